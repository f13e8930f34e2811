"""dockerd is killed in the middle of a run and started again: its rollouts are lost, never scored, and repeated."""

import pytest

from loopwright.core.outcome import Fault, Outcome
from tests import real_docker
from tests.rollouts.harbor import write
from tests.survival.campaign import Campaign, end_of, wait_for

TRIALS = 6
# Calls the model by hand, since the image has no HTTP client, and then works for a while.
AGENT = """
path=/${OPENAI_BASE_URL#http://*/}; host=${OPENAI_BASE_URL#http://}; host=${host%%/*}
body='{"model": "policy", "messages": [{"role": "user", "content": "hi"}]}'
exec 3<>/dev/tcp/${host%:*}/${host#*:}
printf 'POST %s/chat/completions HTTP/1.1\\r\\nHost: x\\r\\n' "$path" >&3
printf 'Authorization: Bearer %s\\r\\n' "$OPENAI_API_KEY" >&3
printf 'Content-Type: application/json\\r\\nConnection: close\\r\\n' >&3
printf 'Content-Length: %d\\r\\n\\r\\n%s' ${#body} "$body" >&3
cat <&3 > reply; grep -q choices reply || exit 9
sleep 3; echo 42 > answer.txt
"""
SCENARIO = f"""
name = "survivor"
[[run]]
name = "work"
agent = {{ type = "collect", trials = {TRIALS}, group_size = 1, seed = 1 }}
engine = {{ type = "scripted", replies = ["yes"] }}
[run.rollout]
tasks = {{ type = "harbor", path = "tasks" }}
loop = {{ type = "remote", command = ["bash", "{{home}}/bin/agent.sh"], sandbox = "docker", readable = ["bin"], concurrency = 2, deadline_s = 120 }}
judger = {{ type = "verifier" }}
"""  # noqa: E501

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.skipif(bool(real_docker.missing_tools()), reason="needs root, dockerd and mmdebstrap")
def test_a06_a_dockerd_that_is_killed_costs_no_reward_and_no_number(tmp_path, monkeypatch):
    test = '[ "$(cat answer.txt)" = 42 ] && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt'
    write(tmp_path / "tasks/answer", test=test, toml='[environment]\ndocker_image = "debian:12-slim"\n')
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/agent.sh").write_text(AGENT)
    campaign = Campaign(tmp_path, SCENARIO)
    with real_docker.docker_daemon() as daemon:
        monkeypatch.setenv("DOCKER_HOST", daemon.address)
        monkeypatch.setenv("DOCKER_BUILDKIT", "0")
        run = campaign.start()
        wait_for(lambda: run.poll() is not None or len(scored(campaign)) >= 2)
        wait_for(lambda: run.poll() is not None or len(daemon.docker("ps", "--quiet").stdout.split()) >= 2)
        assert run.poll() is None
        daemon.kill()
        interrupted = end_of(run)
        daemon.start()
        resumed = campaign.call("resume")
        assert interrupted.code == 1
        assert "Is the docker daemon running?" in interrupted.err + interrupted.out
        assert resumed.code == 0, resumed.err
        assert daemon.docker("ps", "--all", "--quiet").stdout == "", "what the killed daemon left is removed"
    trials = campaign.trials()
    assert [trial.number for trial in trials] == [*range(1, len(trials) + 1)]
    for trial in trials:
        if trial.outcome is Outcome.OK:
            assert trial.reward.value == 1.0
        else:
            assert (trial.outcome, trial.fault, trial.reward) == (Outcome.LOST, Fault.INFRA, None), trial
    assert sum(trial.outcome is Outcome.OK for trial in trials) == TRIALS


def scored(campaign):
    return [trial for trial in campaign.trials() if trial.outcome] if campaign.ledger.exists() else []
