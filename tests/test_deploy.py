"""What `deploy/` says is what the code has: flags, ports, paths, probes, users and settings."""

import json
import re
from pathlib import Path

import pytest
import typer.main
import yaml

from loopwright.cli import app
from loopwright.engines.base import engines
from loopwright.gateway.gateway import GatewayConfig
from loopwright.gateway.server.openapi import find_route

DEPLOY = Path(__file__).parents[1] / "deploy"
ROOT = DEPLOY.parent
LINES = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ").splitlines()


def said(word):
    """What the Dockerfile's lines of this word say."""
    return [line.split(maxsplit=1)[1] for line in LINES if line.startswith(f"{word} ")]


def container():
    *_, workload = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    pod = workload["spec"]["template"]["spec"]
    return workload, pod, pod["containers"][0]


def parsed(words):
    """The words as the command line reads them; it fails on a flag that there is not."""
    verbs = typer.main.get_command(app)
    gateway = verbs.get_command(None, "gateway")
    return gateway.commands["serve"].make_context("serve", list(words)).params


ENTRY = json.loads(said("ENTRYPOINT")[0])
IMAGE = [*ENTRY[3:], *json.loads(said("CMD")[0])]
POD = [*ENTRY[3:], *container()[2]["args"]]


@pytest.mark.parametrize("words", [IMAGE, POD], ids=["image", "pod"])
def test_the_command_is_one_of_ours(words):
    assert ENTRY[:3] == ["loopwright", "gateway", "serve"]
    given = parsed(words)
    settings = dict(setting.split("=", 1) for setting in given["settings"] or [])
    config = GatewayConfig(
        host=given["host"], port=given["port"], advertise=given["advertise"], access_log="-", **settings
    )
    assert config.public
    assert given["token_file"], "other machines are let in with a token only"
    assert not given["log_prompts"]
    assert config.address(given["port"]).endswith(f":{given['port']}"), "agents are given the port that is listened at"
    kind = given["engine"][0].partition(":")[0]
    assert kind in ("tiny", "smollm2", "scripted") or engines.get(kind)


def test_ports_probes_and_paths_are_those_of_the_server():
    workload, _, gateway = container()
    service, _ = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    port = parsed(POD)["port"]
    assert said("EXPOSE") == [str(port)]
    assert gateway["ports"] == [{"name": "http", "containerPort": port}]
    assert service["spec"]["ports"][0]["port"] == port
    assert service["spec"]["selector"] == workload["spec"]["template"]["metadata"]["labels"]
    assert service["metadata"]["name"] in parsed(POD)["advertise"]
    probes = [gateway[name]["httpGet"] for name in ("startupProbe", "readinessProbe")]
    (checked,) = re.findall(rf"http://127.0.0.1:{port}(/\w+)", said("HEALTHCHECK")[0])
    for path in (checked, *(probe["path"] for probe in probes)):
        assert find_route("GET", path) is not None, path
    assert {probe["port"] for probe in probes} == {"http"}


def test_it_may_write_where_it_writes_and_nowhere_else():
    _, pod, gateway = container()
    given = parsed(POD)
    mounts = {mount["mountPath"]: mount for mount in gateway["volumeMounts"]}
    assert str(given["output"]).startswith("/data/")
    assert said("VOLUME") == ["/data"]
    assert str(given["token_file"].parent) in mounts
    items = {item["path"] for volume in pod["volumes"] for item in volume.get("secret", {}).get("items", [])}
    assert given["token_file"].name in items
    assert gateway["securityContext"]["readOnlyRootFilesystem"]
    (user,) = said("USER")
    assert pod["securityContext"]["runAsUser"] == int(user) != 0


def test_streams_come_to_their_end_before_they_are_killed():
    _, pod, _ = container()
    settings = dict(setting.split("=", 1) for setting in parsed(POD)["settings"])
    assert float(settings["drain_s"]) < pod["terminationGracePeriodSeconds"]
    assert said("STOPSIGNAL") == ["SIGTERM"]


def test_the_image_is_made_of_what_there_is():
    import tomllib

    for line in said("COPY"):
        *sources, _ = line.split()
        assert all((ROOT / source).exists() for source in sources), line
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (given,) = [line.removeprefix("EXTRAS=") for line in said("ARG")]
    assert set(given.split(",")) <= set(extras)
