"""The address of a Ray cluster, and what is sent to its nodes."""

import re
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from loopwright.core.errors import ClusterError, ScenarioError
from loopwright.execution.ray.options import check_address
from loopwright.execution.ray.system import RaySystem
from loopwright.scenario.load import load


@pytest.fixture
def closed_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_c01_an_address_where_nothing_listens_is_named_at_once(closed_port):
    with pytest.raises(ClusterError, match=rf"no Ray cluster answers at 127.0.0.1:{closed_port}.*RAY_ADDRESS"):
        check_address(f"127.0.0.1:{closed_port}")


def test_c01_the_port_of_something_else_is_named_at_once():
    """Given the port of Ray's dashboard, say, where Ray would try for minutes."""

    def answer(listener):
        with listener.accept()[0] as connection:
            connection.send(b"HTTP/1.1 400 Bad Request")

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor() as threads:
        answered = threads.submit(answer, listener)
        with pytest.raises(ClusterError, match="what listens there is not the head of a cluster"):
            check_address(f"127.0.0.1:{listener.getsockname()[1]}")
        answered.result()


def test_c01_ray_client_is_refused_with_the_way_that_works():
    with pytest.raises(ClusterError, match="ray job submit"):
        check_address("ray://127.0.0.1:10001")


def test_addresses_without_a_port_are_left_to_ray():
    check_address("auto")


def run_of(system):
    workload = {
        "type": "command",
        "command": "true {n}",
        "args": {"n": [1, 2]},
        "metrics": {"y": {"resource": "wall_s"}},
    }
    reward = {"type": "identity", "metrics": ["y"]}
    run = {"name": "work", "agent": {"type": "grid"}, "reward": reward, "workload": workload}
    return {"name": "x", "system": {"type": "ray", **system}, "run": [run]}


def test_c01_verify_names_a_cluster_that_does_not_answer(closed_port):
    loaded = load(run_of({"address": f"127.0.0.1:{closed_port}"}))
    (problem,) = loaded.runs[0].unreachable(loaded.scenario.system)
    assert problem.key == "[system] address"
    assert "no Ray cluster answers" in problem.message


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"workdir": "."}, r"unknown key 'workdir' of a runtime_env.*Did you mean 'working_dir'"),
        ({"working_dir": "nowhere"}, r"\[system\] runtime_env.working_dir.*there is no .*nowhere"),
        ({"py_modules": ["nowhere"]}, r"runtime_env.py_modules.*there is no"),
    ],
)
def test_a_wrong_runtime_env_is_refused_at_load_time(env, message):
    with pytest.raises(ScenarioError) as caught:
        load(run_of({"runtime_env": env}))
    assert re.search(message, str(caught.value), re.DOTALL)


def test_paths_of_a_runtime_env_are_relative_to_the_scenario(tmp_path):
    (tmp_path / "study").mkdir()
    env = {"working_dir": ".", "py_modules": ["study", "s3://bucket/package.zip"], "pip": ["six"]}
    system = RaySystem(runtime_env=env).resolved(tmp_path)
    assert Path(system.runtime_env["working_dir"]) == tmp_path
    assert system.runtime_env["py_modules"] == [str(tmp_path / "study"), "s3://bucket/package.zip"]
    assert system.directory_on_nodes(tmp_path / "study") == Path("study")
    assert system.directory_on_nodes(tmp_path.parent) == tmp_path.parent
    assert RaySystem().directory_on_nodes(tmp_path) == tmp_path
