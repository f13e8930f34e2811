"""The contract G13: agents of the default loop act live, `random` included, and servers can be passed in Python."""

import gymnasium
import pytest

import loopwright
from loopwright.core.outcome import Outcome
from loopwright.ledger.ledger import Ledger
from loopwright.scenario.dispatch import dispatch
from loopwright.scenario.load import load
from tests.contracts.gymnasium_harness import DRAWN_SPEED, live_scenario, load_error, write_scenario
from tests.contracts.harness import resumed
from tests.envs.helpers import LineServer

AGENT = """
from loopwright import Feedback, Observation, SearchAgent

class Walks(SearchAgent):
    seen, feedback = [], []
    samples_env_params = True

    def select_action(self, observation: Observation):
        self.seen.append(observation)
        return 2 if len(self.seen) % 2 else {"action": 2}

    def update_policy(self, feedback: Feedback):
        self.feedback.append(feedback)
"""


@pytest.fixture
def walker(tmp_path):
    name = f"walker_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(AGENT)
    return f"{name}:Walks"


def ledger_of(directory):
    with Ledger.read(directory / "out" / "p" / "ledger.db") as ledger:
        return list(ledger.trials()), list(ledger.episodes())


def test_g13_an_agent_of_the_default_loop_acts_live_and_resets_on_done(tmp_path, walker):
    text = live_scenario(more=DRAWN_SPEED, agent=f'agent = {{ type = "{walker}", trials = 12 }}')
    loaded = load(write_scenario(tmp_path, text))
    assert dispatch(loaded, tmp_path / "out") == 0
    agent = loaded.runs[0].agent_class
    trials, episodes = ledger_of(tmp_path)
    assert [trial.action for trial in trials] == [2] * 12
    assert [(one["first"], one["last"]) for one in episodes] == [(1, 5), (6, 10), (11, 12)]
    assert [one.done for one in agent.feedback] == [n in (5, 10, 12) for n in range(1, 13)]
    assert [one.trial for one in agent.feedback] == list(range(1, 13))
    first, second, *_ = agent.feedback
    assert (first.reward.value, first.values, first.outcome) == (1.0, (1.0,), Outcome.OK)
    assert second.previous is first.observation
    assert second.previous.metrics["observation"].tolist() == [1.0, 4.0]
    assert agent.seen[5].metrics["observation"].tolist() == [0.0, 5.0], "a new episode"
    assert {one.regime["speed"] for one in agent.feedback} <= {1.0, 2.0}
    assert all(one.regime == one.previous.context for one in agent.feedback)


def test_g13_a_resumed_agent_learns_from_the_recorded_steps(tmp_path, walker):
    text = live_scenario(agent=f'agent = {{ type = "{walker}", trials = 7 }}')
    loaded = load(write_scenario(tmp_path, text))
    assert dispatch(loaded, tmp_path / "out") == 0
    agent = loaded.runs[0].agent_class
    before, agent.feedback = agent.feedback, []
    (tmp_path / "out/scenario.toml").write_text(text.replace("trials = 7", "trials = 10"))
    assert resumed(tmp_path) == 0
    assert [one.trial for one in agent.feedback] == list(range(1, 11))
    assert [one.reward for one in agent.feedback[:7]] == [one.reward for one in before]
    assert agent.feedback[3].observation.metrics["observation"] == [4.0, 1.0]


def test_g13_random_is_the_live_baseline(tmp_path):
    text = live_scenario("gymnasium:CartPole-v1", agent='agent = { type = "random", trials = 200, seed = 3 }')
    for output in ("out", "again"):
        assert dispatch(load(write_scenario(tmp_path, text)), tmp_path / output) == 0
    trials, episodes = ledger_of(tmp_path)
    assert {trial.action for trial in trials} == {0, 1}
    assert len(trials) == 200
    assert len(episodes) > 3
    with Ledger.read(tmp_path / "again" / "p" / "ledger.db") as ledger:
        assert [trial.action for trial in ledger.trials()] == [trial.action for trial in trials], "by its seed"
    assert "'grid' cannot act" in load_error(tmp_path, live_scenario(agent='agent = { type = "grid" }'))
    start = 'agent = { type = "random", trials = 5, start = "first" }'
    assert "[run.agent] start" in load_error(tmp_path, live_scenario(agent=start))


def test_g13_a_failed_step_is_feedback_without_a_reward(tmp_path, walker):
    server = LineServer({2: 5, 4: RuntimeError("gone")})
    text = live_scenario(agent=f'agent = {{ type = "{walker}", trials = 9 }}')
    loaded = load(write_scenario(tmp_path, text))
    assert dispatch(loaded, tmp_path / "out", server=server) == 1, "a server that dies fails its run"
    feedback = loaded.runs[0].agent_class.feedback
    assert [one.outcome for one in feedback] == [Outcome.OK, Outcome.METRIC_MISSING, Outcome.OK]
    assert (feedback[1].reward, feedback[1].values, feedback[1].done) == (None, None, True)
    assert server.closed == 1
    with Ledger.read(tmp_path / "out" / "p" / "ledger.db") as ledger:
        assert ledger.state("failure") == "lost (infra): the server failed: RuntimeError: gone"


def test_g13_a_server_object_is_run_without_being_named(tmp_path):
    scenario = {
        "name": "object",
        "run": [{"name": "p", "agent": {"type": "random", "trials": 30}, "live": {"record": "steps"}}],
    }
    study = loopwright.run(scenario, tmp_path / "out", server=gymnasium.make("CartPole-v1"))
    assert study.code == 0
    assert len(study.trials()) == 30
    with pytest.raises(loopwright.ScenarioError, match="names no environment"):
        load(scenario)


OWN_LOOP = """
from loopwright import Agent
from loopwright.envs import LiveAdapter

class Loops(Agent):
    def run(self):
        env = LiveAdapter(self.env)
        env.reset(seed=self.config.seed)
        for _ in range(self.config.trials or 0):
            *_, terminated, truncated, _ = env.step(env.action_space.sample())
            if terminated or truncated:
                env.reset()
        return 0

class LoopsLive(Loops):
    steps_live = True
"""


def test_an_agent_with_its_own_loop_acts_live_if_it_says_so(tmp_path, caplog):
    (tmp_path / f"own_{tmp_path.name}.py").write_text(OWN_LOOP)
    agent = f'agent = {{ type = "own_{tmp_path.name}:LoopsLive", trials = 12 }}'
    assert dispatch(load(write_scenario(tmp_path, live_scenario(agent=agent))), tmp_path / "out") == 0
    trials, episodes = ledger_of(tmp_path)
    assert (len(trials), len(episodes)) == (12, 3)
    message = load_error(tmp_path, live_scenario(agent=agent.replace("LoopsLive", "Loops")))
    assert "set steps_live = True in its class" in message

    idle = live_scenario(agent=agent.replace(", trials = 12", ""))
    assert dispatch(load(write_scenario(tmp_path, idle)), tmp_path / "idle") == 1
    assert "its agent ended without a trial" in caplog.text
