"""The contract R09: a regime that is recorded was applied, or the scenario is refused."""

import pytest

from loopwright.envs.live.server import ServerError
from loopwright.ledger.ledger import Ledger
from loopwright.scenario.dispatch import dispatch
from loopwright.scenario.load import load
from tests.contracts.gymnasium_harness import load_error, write_scenario
from tests.envs.helpers import LineServer, live_env

WORLDS = """
import numpy as np
from gymnasium import spaces

class World:
    observation_space = spaces.Box(-100, 100, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, gravity=9.8, goal=1):
        self.gravity, self.left = gravity, 0

    def reset(self, *, seed=None, options=None):
        self.left = 3
        return np.array([self.gravity], np.float32), {}

    def step(self, action):
        self.left -= 1
        return np.array([self.gravity], np.float32), 1.0, self.left == 0, False, {}

    def close(self): ...

class Listens(World):
    def __init__(self):
        super().__init__()

    def reset(self, *, seed=None, options=None):
        self.gravity = options["env_params"]["gravity"]
        return super().reset()[0], {"env_params": {"gravity": self.gravity}}

class Deaf(Listens):
    def reset(self, *, seed=None, options=None):
        return World.reset(self)
"""


def scenario(env_class, args, *more, drawn="gravity"):
    lines = "\n".join(more)
    return f"""
name = "test"
[[run]]
name = "p"
agent = {{ type = "a2c", trials = 30, rollout = 10 }}
[run.live]
env_class = "{env_class}"
{lines}
[run.live.args]
{args}
{f"[run.env_params.{drawn}]" if drawn else ""}
"""


@pytest.fixture
def worlds(tmp_path, monkeypatch):
    name = f"worlds_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(WORLDS)
    return name


@pytest.mark.parametrize("isolate", ["true", "false"])
@pytest.mark.parametrize("kind", ["World", "Listens"])
def test_r09_a_recorded_regime_was_applied(tmp_path, worlds, kind, isolate):
    text = scenario(f"{worlds}:{kind}", "gravity = [1.5, 20.0]", f"isolate = {isolate}")
    assert dispatch(load(write_scenario(tmp_path, text)), tmp_path / "out") == 0
    with Ledger.read(tmp_path / "out" / "p" / "ledger.db") as ledger:
        rows = [(trial.regime["gravity"], *trial.metrics["observation"]) for trial in ledger.trials()]
    assert set(rows) == {(1.5, 1.5), (20.0, 20.0)}


@pytest.mark.parametrize(
    ("env_class", "args", "drawn", "words"),
    [
        ("{worlds}:Deaf", "gravity = [1, 2]", "gravity", "args.gravity: the environment does not apply 'gravity'"),
        ("gymnasium:CartPole-v1", "gravity = [1, 2]", "gravity", "the environment does not apply 'gravity'"),
        ("{worlds}:World", "gaol = 3", "", "no argument 'gaol'. Known: gravity, goal. Did you mean 'goal'?"),
        ("gymnasium:Pendulum-v1", "q = 3.0", "", "unexpected keyword argument 'q'"),
    ],
)
def test_r09_an_argument_that_takes_no_effect_is_refused_at_load_time(tmp_path, worlds, env_class, args, drawn, words):
    message = load_error(tmp_path, scenario(env_class.format(worlds=worlds), args, drawn=drawn))
    assert words in " ".join(message.split())


def test_r09_gymnasium_environments_are_built_with_the_drawn_argument(tmp_path):
    text = scenario("gymnasium:Pendulum-v1", "g = [1.0, 9.8]", drawn="g")
    live = load(write_scenario(tmp_path, text)).runs[0].live
    (server,) = live.connect(tmp_path, ["g"])
    assert server.reset(options={"env_params": {"g": 1.0}})[1] == {"env_params": {"g": 1.0}}
    server.close()


def test_r09_an_object_that_does_not_acknowledge_a_regime_is_refused(tmp_path):
    class Deaf(LineServer):
        def reset(self, **options):
            return super().reset()

    env = live_env(tmp_path, Deaf(), drawn={"speed": [1, 2]})
    with pytest.raises(ServerError, match="does not apply 'speed'"):
        env.start_episode()
    env.close()
