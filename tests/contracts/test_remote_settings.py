"""Contract T09: settings of remote agents and gateways."""

import os
import subprocess
import sys

import pytest

from loopwright.core.episode import Episode
from loopwright.core.errors import ScenarioError
from loopwright.gateway.client import endpoint
from loopwright.ledger.ledger import Ledger
from loopwright.rollouts.remote.gateway_config import EmbeddedGatewayConfig
from loopwright.scenario.load import load
from loopwright.scenario.overrides import parse_assignments
from tests.rollouts.pools.ray_cluster import cluster  # noqa: F401
from tests.rollouts.remote.agents import ENGINE, scenario
from tests.survival.campaign import Campaign


@pytest.fixture
def loaded(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith(("REMOTE_", "LLM_PROXY", "PROXY_SERVER"))]:
        monkeypatch.delenv(name)
    file = tmp_path / "s.toml"

    def of(*settings, more=ENGINE, environ=None, loop=""):
        file.write_text(scenario(tmp_path, "chat()", more=more, loop=loop))
        with monkeypatch.context() as patched:
            for name, value in (environ or {}).items():
                patched.setenv(name, value)
            return load(file, set=parse_assignments(settings)).scenario.run[0]

    return of


def test_t09_the_command_line_overrides_the_environment_and_the_file(loaded):
    gateway = ENGINE + "[run.gateway]\nport = 1111\nttl_s = 5\n"
    assert loaded(more=gateway).gateway == EmbeddedGatewayConfig(port=1111, ttl_s=5)
    environ = {"REMOTE_GATEWAY_PORT": "2222", "REMOTE_DEADLINE_S": "30", "REMOTE_ENV": '{"A": "1"}'}
    run = loaded(more=gateway, environ=environ)
    assert run.gateway == EmbeddedGatewayConfig(port=2222, ttl_s=5)
    assert (run.rollout.loop.deadline_s, run.rollout.loop.env) == (30.0, {"A": "1"})
    run = loaded("gateway.port=3333", "loop.deadline_s=7", more=gateway, environ=environ)
    assert (run.gateway.port, run.rollout.loop.deadline_s) == (3333, 7.0)
    assert run.rollout.loop.env == {"A": "1"}


def test_t09_a_url_names_an_external_gateway(loaded):
    run = loaded(environ={"PROXY_SERVER_URL": "https://gateway.example", "REMOTE_GATEWAY_TOKEN": "0123456789abcdef"})
    assert (run.gateway.type, run.gateway.url, run.engine.type) == ("external", "https://gateway.example", "external")
    assert "0123456789abcdef" not in run.model_dump_json()
    assert endpoint(run.gateway.url) == ("gateway.example", 443)
    assert endpoint("http://gpu-box/proxy/") == ("gpu-box", 80)
    assert endpoint("http://gpu-box:8400") == ("gpu-box", 8400)
    for bad in ("gpu-box:8400", "http://gpu-box:port", "ftp://gpu-box", "http://"):
        with pytest.raises(ValueError, match="not the URL of a gateway"):
            endpoint(bad)


def test_t09_agents_get_the_address_that_is_set(loaded):
    environ = {"LLM_PROXY_IP": "gpu-box"}
    gateway = loaded(environ=environ).gateway
    assert (gateway.host, gateway.address(8400)) == ("0.0.0.0", "http://gpu-box:8400")
    with pytest.raises(ScenarioError, match=r"advertise_host: agents would connect to gpu-box, but the gateway"):
        loaded("gateway.host=127.0.0.1", environ=environ)
    gateway = loaded("gateway.host=0.0.0.0", environ=environ).gateway
    assert gateway.address(8400) == "http://gpu-box:8400"


def test_t09_error_messages_name_the_key(loaded):
    with pytest.raises(ScenarioError, match=r"environment variable REMOTE_ARGS is not valid JSON"):
        loaded(environ={"REMOTE_ARGS": '{"a": '})
    with pytest.raises(ScenarioError, match=r"environment variable REMOTE_GATEWAY_PORT is not valid JSON"):
        loaded(environ={"REMOTE_GATEWAY_PORT": "[84"})
    with pytest.raises(ScenarioError, match=r"\[run.gateway\]: unknown key 'prot'. Known: .* Did you mean 'port'"):
        loaded("gateway.prot=1")
    with pytest.raises(ScenarioError, match=r"unknown key 'port'. Known: name, home, system, run"):
        loaded("port=1")
    with pytest.raises(ScenarioError, match=r"unknown gateway 'rai'. Known: embedded, ray, .* Did you mean 'ray'"):
        loaded(environ={"REMOTE_GATEWAY_TYPE": "rai"})
    with pytest.raises(ScenarioError, match=r"\[run.engine\]: has no meaning with an external gateway"):
        loaded(more=ENGINE + '[run.gateway]\ntype = "external"\nurl = "http://g"\n')


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("REMOTE_DEADLINE", "REMOTE_DEADLINE_S"),
        ("REMOTE_COMMANDS", "REMOTE_COMMAND"),
        ("REMOTE_GATEWAY_PROT", "REMOTE_GATEWAY_PORT"),
        ("REMOTE_GATEWAY_COLOUR", "REMOTE_GATEWAY_"),
        ("REMOTE_SERVER_TOKENS", "REMOTE_SERVER_TOKEN"),
        ("LLM_PROXY_IPS", "LLM_PROXY_IP"),
        ("PROXY_SERVER_URI", "PROXY_SERVER_URL"),
    ],
)
def test_t09_a_misspelled_variable_is_an_error_that_names_the_nearest(loaded, name, nearest):
    with pytest.raises(ScenarioError, match=rf"environment variable {name} sets nothing. Did you mean {nearest}"):
        loaded(environ={name: "1"})


def test_t09_variables_of_editors_and_web_servers_are_warned_of_once(loaded, caplog):
    environ = {"REMOTE_CONTAINERS": "true", "REMOTE_ADDR": "127.0.0.1", "REMOTE_USER": "me"}
    for _ in range(2):
        loaded(environ=environ)
    warnings = [record.message for record in caplog.records if "sets nothing" in record.message]
    assert warnings == [f"environment variable {name} sets nothing of a remote loop" for name in sorted(environ)]
    loaded(environ={"REMOTE_GATEWAY_MINE": "1"}, loop=', pass_env = ["REMOTE_GATEWAY_MINE"]')


def test_t09_a_variable_for_another_type_of_gateway_is_named(loaded, caplog):
    loaded(environ={"REMOTE_GATEWAY_URL": "http://gpu-box:8400", "PROXY_SERVER": "somebody else's"})
    (warning,) = [record.message for record in caplog.records if "sets nothing" in record.message]
    assert warning.startswith("environment variable REMOTE_GATEWAY_URL sets nothing: [run.gateway] type = 'embedded'")
    assert warning.endswith("it is a key of external")


def test_t09_a_resume_keeps_the_settings_of_its_run(tmp_path):
    campaign = Campaign(tmp_path, scenario(tmp_path, "chat(); print(os.environ['FLAVOUR'])"))
    command = [sys.executable, "-m", "loopwright", "run", str(campaign.scenario), "--output", str(campaign.output)]
    result = subprocess.run(
        [*command, "--set", 'loop.env={"FLAVOUR": "set"}'], capture_output=True, text=True, timeout=90
    )
    assert result.returncode == 0, result.stderr
    assert campaign.call("resume").code == 0, "the same settings, so the same inputs"
    with Ledger.read(campaign.ledger) as ledger:
        episode = Episode.from_bytes(ledger.payload(1, "rollout"))
    assert episode.evidence["agent"]["stdout"] == "set\n"
