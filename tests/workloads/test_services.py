"""Services: started before a trial's command in its slot, watched while it runs, and gone with it."""

import asyncio
import json
import os
import socket
import sys
from contextlib import closing

import pytest

from loopwright.core.outcome import Outcome
from loopwright.core.trial import Result
from loopwright.execution.local.system import LocalSystem
from loopwright.testing.executors import alive, ignore
from loopwright.workloads.base import Job, Site
from loopwright.workloads.command import CommandWorkload
from loopwright.workloads.command_config import CommandConfig

SERVER = """
import os, socket, sys, time
port, mode = int(sys.argv[1]), sys.argv[2]
print("warming up", file=sys.stderr, flush=True)
open("pid", "w").write(str(os.getpid()))
if mode == "hang":
    time.sleep(1000)
if mode == "fork" and os.fork():
    sys.exit(0)
server = socket.create_server(("127.0.0.1", port))
print("ready for work", flush=True)
while True:
    connection, _ = server.accept()
    with connection:
        request = connection.recv(100)
        connection.sendall(b"HTTP/1.0 200 OK\\r\\n\\r\\n" + str(os.getpid()).encode())
        if request == b"die":
            print("out of memory", file=sys.stderr, flush=True)
            os._exit(3)
"""
CLIENT = """
import socket, sys, time
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as connection:
    connection.sendall(sys.argv[2].encode())
    answer = b"".join(iter(lambda: connection.recv(100), b""))
print("pid=" + answer.split()[-1].decode())
time.sleep(1000 if sys.argv[2] == "die" else 0)
sys.exit(sys.argv[2] == "fail")
"""


@pytest.fixture
def site(tmp_path):
    (tmp_path / "scenario").mkdir()
    (tmp_path / "scenario" / "server.py").write_text(SERVER)
    (tmp_path / "scenario" / "client.py").write_text(CLIENT)
    return Site(scenario_dir=tmp_path / "scenario", directory=tmp_path / "run", system=LocalSystem(grace_s=0.1))


def configure(request: str = "hello", mode: str = "serve", port: str = "{port}", **service) -> CommandConfig:
    return CommandConfig(
        files=("server.py", "client.py"),
        command=(sys.executable, "client.py", port, request),
        metrics={"pid": {"regex": "pid=([0-9]+)"}},
        service={"command": (sys.executable, "server.py", port, mode), "ready": {"port": port}, **service},
    )


def run(site: Site, config: CommandConfig, *arguments: dict, services: list | None = None) -> list[Result]:
    """Run one trial after another."""

    async def main() -> list[Result]:
        workload = CommandWorkload(config, site)
        try:
            return [
                await workload.run(
                    Job(
                        n,
                        site.directory / "trials" / str(n),
                        values,
                        b"{}",
                        f"test-{os.getpid()}.{n}",
                        ignore,
                        on_services=(services if services is not None else []).append,
                    )
                )
                for n, values in enumerate(arguments, 1)
            ]
        finally:
            await workload.close()

    return asyncio.run(main())


@pytest.mark.parametrize(
    "ready", [{"port": "{port}"}, {"http": "http://127.0.0.1:{port}/"}, {"regex": "ready for .ork"}], ids=str
)
def test_a_trial_starts_when_its_service_is_ready(site, ready):
    """Given a service, when a trial ends, then it was served, the log is beside its own and the service is gone."""
    records: list = []
    (result,) = run(site, configure(ready=ready), {}, services=records)
    assert result.outcome is Outcome.OK, result.reason
    pid = int(result.metrics["pid"])
    assert not alive(pid)
    assert (site.directory / "trials/1/service.stdout").read_text() == "ready for work\n"
    assert [[int(handle.partition(":")[0]) for handle in record] for record in records] == [[pid], []]


@pytest.mark.parametrize(
    ("config", "outcome", "words"),
    [
        (
            configure(mode="hang", ready={"port": "{port}", "timeout_s": 0.5}),
            "timeout",
            "was not ready after 0.5 s",
        ),
        (configure(mode="fork"), "crashed", "exit code 0; it must stay in the foreground; its log ends with: warming"),
        (configure("die"), "crashed", "during the trial: exit code 3; its log ends with: warming up | out of memory"),
        (configure(command=("./gone",)), "crashed", "service 'service': cannot start './gone'"),
        (configure(ready={"port": "{word}"}), "crashed", "'no' is not a port"),
    ],
)
def test_a_service_that_fails_fails_its_trial(site, config, outcome, words):
    """Given a service that never is ready, forks, dies or cannot start, its trial fails and names the service."""
    (result,) = run(site, config, {"word": "no"})
    assert (result.outcome, words in result.reason) == (outcome, True), result.reason
    pid = site.directory / "trials/1/pid"
    assert not pid.exists() or not alive(int(pid.read_text()))


def test_a_port_that_others_hold_is_not_mistaken_for_the_service(site):
    """Given a port in use, a fixed one fails the trial, and a free one is found for `{port}`."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        (result,) = run(site, configure(port=str(server.getsockname()[1])), {})
    assert "is in use by another process; use {port}" in result.reason


def test_a_service_is_reused_by_trials_with_the_same_arguments(site):
    """Given `reuse`, the service stays until its arguments change or a trial fails."""
    config = configure("{request}", "{mode}", reuse=True)
    modes = [("a", "x"), ("b", "x"), ("c", "y"), ("fail", "y"), ("d", "y")]
    results = run(site, config, *({"request": request, "mode": mode} for request, mode in modes))
    pids = [result.metrics.get("pid") for result in results]
    assert pids[0] == pids[1] != pids[2]
    assert [result.outcome for result in results] == ["ok", "ok", "ok", "crashed", "ok"]
    assert pids[4] not in (None, *pids[:3])
    assert not any(alive(int(pid)) for pid in pids if pid is not None)
    assert (site.directory / "trials/2/service.stdout").read_text() == "ready for work\n"


def test_several_services_have_ports_of_their_own(site):
    """Given two services, each gets the port it names, and both run before the command."""
    services = [
        {"name": name, "command": (sys.executable, "server.py", port, "serve"), "ready": {"port": port}}
        for name, port in (("first", "{port}"), ("second", "{port_2}"))
    ]
    config = configure(port="{port_2}").model_copy(
        update={"service": CommandConfig(command="x", service=services).service}
    )
    (result,) = run(site, config, {})
    assert result.outcome is Outcome.OK, result.reason
    assert {path.name for path in (site.directory / "trials/1").glob("*.stdout")} == {"first.stdout", "second.stdout"}


def test_python_functions_have_the_variables_of_their_slot(site):
    """Given a function, it finds slot, port and devices in its environment."""
    from loopwright.workloads.python import PythonConfig, PythonWorkload

    (site.scenario_dir / "train.py").write_text(
        "import os\ndef f():\n    e = os.environ\n"
        "    return {'slot': int(e['LOOPWRIGHT_SLOT']), 'port': int(e['LOOPWRIGHT_PORT']),"
        " 'gpu': int(e['CUDA_VISIBLE_DEVICES'])}\n"
    )
    site = Site(site.scenario_dir, site.directory, system=LocalSystem(gpus=[7]))

    async def main() -> Result:
        workload = PythonWorkload(PythonConfig(function="train:f", gpus=1), site)
        try:
            return await workload.run(Job(1, site.directory / "trials/1", {}, b"{}", "t.1", ignore))
        finally:
            await workload.close()

    result = asyncio.run(main())
    assert (result.metrics["slot"], result.metrics["gpu"], result.metrics["port"] > 1024) == (0, 7, True), result


def test_parameters_and_logs_with_hostile_text_stay_text(site):
    """Given hostile arguments, a service gets them unchanged, and its last words are quoted as they are."""
    text = "$(touch broken) {port} '\"; \x1b[31m"
    config = CommandConfig(
        command="true",
        service={"command": ("sh", "-c", 'printf "%s" "$1" >&2; exit 1', "sh", "{text}"), "ready": {"regex": "never"}},
    )
    (result,) = run(site, config, {"text": text})
    assert result.reason.endswith(f"its log ends with: {text}"), json.dumps(result.reason)
    assert not (site.directory / "trials/1/broken").exists()
