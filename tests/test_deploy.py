"""`deploy/` matches the code: flags, ports, paths, probes, users and settings."""

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


def instructions(word):
    """The arguments of the Dockerfile's instructions of this kind."""
    return [line.split(maxsplit=1)[1] for line in LINES if line.startswith(f"{word} ")]


def container():
    *_, workload = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    pod = workload["spec"]["template"]["spec"]
    return workload, pod, pod["containers"][0]


def parsed(words):
    """The options as the command line parses them; an unknown flag fails."""
    verbs = typer.main.get_command(app)
    gateway = verbs.get_command(None, "gateway")
    return gateway.commands["serve"].make_context("serve", list(words)).params


ENTRY = json.loads(instructions("ENTRYPOINT")[0])
IMAGE = [*ENTRY[3:], *json.loads(instructions("CMD")[0])]
POD = [*ENTRY[3:], *container()[2]["args"]]


@pytest.mark.parametrize("words", [IMAGE, POD], ids=["image", "pod"])
def test_the_command_is_one_of_ours(words):
    assert ENTRY[:3] == ["loopwright", "gateway", "serve"]
    options = parsed(words)
    settings = dict(setting.split("=", 1) for setting in options["settings"] or [])
    config = GatewayConfig(
        host=options["host"], port=options["port"], advertise=options["advertise"], access_log="-", **settings
    )
    assert config.public
    assert options["token_file"], "other machines need a token"
    assert not options["log_prompts"]
    assert config.address(options["port"]).endswith(f":{options['port']}"), "agents get the port that is listened on"
    kind = options["engine"][0].partition(":")[0]
    assert kind in ("tiny", "smollm2", "scripted") or engines.get(kind)


def test_ports_probes_and_paths_are_those_of_the_server():
    workload, _, gateway = container()
    service, _ = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    port = parsed(POD)["port"]
    assert instructions("EXPOSE") == [str(port)]
    assert gateway["ports"] == [{"name": "http", "containerPort": port}]
    assert service["spec"]["ports"][0]["port"] == port
    assert service["spec"]["selector"] == workload["spec"]["template"]["metadata"]["labels"]
    assert service["metadata"]["name"] in parsed(POD)["advertise"]
    probes = [gateway[name]["httpGet"] for name in ("startupProbe", "readinessProbe")]
    (checked,) = re.findall(rf"http://127.0.0.1:{port}(/\w+)", instructions("HEALTHCHECK")[0])
    for path in (checked, *(probe["path"] for probe in probes)):
        assert find_route("GET", path) is not None, path
    assert {probe["port"] for probe in probes} == {"http"}


def test_only_the_output_directories_are_writable():
    _, pod, gateway = container()
    options = parsed(POD)
    mounts = {mount["mountPath"]: mount for mount in gateway["volumeMounts"]}
    assert str(options["output"]).startswith("/data/")
    assert instructions("VOLUME") == ["/data"]
    assert str(options["token_file"].parent) in mounts
    items = {item["path"] for volume in pod["volumes"] for item in volume.get("secret", {}).get("items", [])}
    assert options["token_file"].name in items
    assert gateway["securityContext"]["readOnlyRootFilesystem"]
    (user,) = instructions("USER")
    assert pod["securityContext"]["runAsUser"] == int(user) != 0


def test_the_grace_period_lets_streams_finish():
    _, pod, _ = container()
    settings = dict(setting.split("=", 1) for setting in parsed(POD)["settings"])
    assert float(settings["drain_s"]) < pod["terminationGracePeriodSeconds"]
    assert instructions("STOPSIGNAL") == ["SIGTERM"]


def test_the_image_uses_existing_files_and_extras():
    import tomllib

    for line in instructions("COPY"):
        *sources, _ = line.split()
        assert all((ROOT / source).exists() for source in sources), line
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (options,) = [line.removeprefix("EXTRAS=") for line in instructions("ARG")]
    assert set(options.split(",")) <= set(extras)
