"""Real inference servers for measurements and slow tests, each in its own virtual environment."""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from loopwright.engines.inprocess import smollm2

ENVIRONMENTS = Path(__file__).parent.parent / ".venvs"
_START_S = 900.0
_VLLM = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "2",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
_running: dict[str, subprocess.Popen[bytes]] = {}
_LLAMACPP = """
import signal, sys
import xllamacpp as llama
params = llama.CommonParams()
params.model.path, params.port = sys.argv[1], int(sys.argv[2])
params.hostnames = ["127.0.0.1"]
params.n_parallel, params.n_ctx = int(sys.argv[3]), 2048 * int(sys.argv[3])
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 2
if sys.argv[4] == "exact":
    params.cache_type_k = params.cache_type_v = llama.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = llama.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
server = llama.Server(params)
signal.pause()
"""


def missing(name: str) -> str | None:
    """Why a server cannot be had, with the next move; None if it can."""
    if (ENVIRONMENTS / name / ".ready").exists():
        return None
    return f"{name} is not installed: run `make .venvs/{name}/.ready`"


@contextmanager
def vllm(port: int = 0, *, model: Path | None = None) -> Iterator[str]:
    """The URL of a vLLM server with a model, SmolLM2 by default, in single precision, at this port or a free one."""
    path = str(model or smollm2.directory())
    command = ["-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--model", path]
    command += ["--dtype", "float32", "--enforce-eager", "--logprobs-mode", "processed_logprobs"]
    # On a CPU, a seeded request whose prompt it takes in by parts would end it: "CPU Generator does not use offset".
    command += ["--max-model-len", "4096", "--max-num-batched-tokens", "8192", "--no-enable-chunked-prefill"]
    with _serve("vllm", lambda at: [*command, "--port", str(at)], _VLLM, port) as url:
        yield url


@contextmanager
def llamacpp(slots: int = 8, *, exact: bool = True, model: Path | None = None) -> Iterator[str]:
    """The URL of llama.cpp's server with a GGUF file; SmolLM2 by default, in single precision or as packaged."""
    file = model or (gguf() if exact else smollm2.package_file())
    settings = [str(slots), "exact" if exact else "fast"]
    with _serve("llamacpp", lambda port: ["-c", _LLAMACPP, str(file), str(port), *settings], {}) as url:
        yield url


def gguf() -> Path:
    """SmolLM2 in float32, in llama.cpp's format; converted once, beside the directory for transformers."""
    target = smollm2.cache_dir() / "smollm2-135m-instruct-f32.gguf"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=smollm2.directory().parent) as part:
            _unpacked(smollm2.package_file(), Path(part) / "model.gguf")
            shutil.move(Path(part) / "model.gguf", target)
    return target


def _unpacked(source: Path, target: Path) -> None:
    import numpy as np
    from gguf import GGUFReader, GGUFValueType, GGUFWriter
    from gguf.quants import dequantize

    reader, writer = GGUFReader(source), GGUFWriter(target, "llama")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            kind, inner = field.types[0], field.types[-1]
            writer.add_key_value(name, field.contents(), kind, inner if kind == GGUFValueType.ARRAY else None)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@contextmanager
def _serve(name: str, arguments: Any, environment: Mapping[str, str], port: int = 0) -> Iterator[str]:
    if (problem := missing(name)) is not None:
        raise RuntimeError(problem)
    with socket.create_server(("127.0.0.1", port)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [ENVIRONMENTS / name / "bin" / "python", *arguments(port)],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        _running[url] = process
        try:
            deadline = time.monotonic() + _START_S
            while not _healthy(url):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise RuntimeError(f"{name} did not start: {log.read()[-2000:].decode(errors='replace')}")
                time.sleep(0.2)
            yield url
        finally:
            for number in (signal.SIGTERM, signal.SIGKILL):
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=20)


def kill(url: str) -> None:
    """End a server at once, with all its processes, as if its machine had failed."""
    os.killpg(_running[url].pid, signal.SIGKILL)
    _running[url].wait()


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False
