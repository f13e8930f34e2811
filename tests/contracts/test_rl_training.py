"""Live training: exactly what bare Stable-Baselines3 does, with one environment or several, and after a kill."""

import os
import signal
import subprocess
import sys

import gymnasium
import numpy as np
import pytest
import stable_baselines3
from gymnasium.utils.env_checker import data_equivalence
from stable_baselines3.common.env_util import make_vec_env

import loopwright
from loopwright.ledger.check import check_ledger
from loopwright.ledger.ledger import Ledger
from tests.agents.rl.scenarios import live_scenario, load_error, resume, train, write_scenario
from tests.envs.helpers import wait_until

pytestmark = pytest.mark.filterwarnings("ignore:You are trying to run PPO on the GPU")
OPTIONS = {
    "ppo": {"n_steps": 64, "batch_size": 64, "n_epochs": 2},
    "dqn": {"learning_starts": 100, "buffer_size": 1000},
    "sac": {"learning_starts": 380, "buffer_size": 1000},
}


def episodes(directory):
    with Ledger.read(directory / "out" / "r" / "ledger.db") as ledger:
        return list(ledger.episodes())


def table(options):
    return "{ " + ", ".join(f"{name} = {value}" for name, value in options.items()) + " }"


@pytest.mark.parametrize(
    ("kind", "env", "steps", "envs"),
    [
        ("ppo", "CartPole-v1", 256, 1),
        ("ppo", "CartPole-v1", 1024, 4),
        ("dqn", "MountainCar-v0", 450, 1),
        ("sac", "Pendulum-v1", 410, 1),
    ],
)
def test_g15_returns_are_those_of_bare_stable_baselines(tmp_path, kind, env, steps, envs):
    agent = f'type = "{kind}", trials = {steps}, seed = 3, options = {table(OPTIONS[kind])}'
    assert train(tmp_path, live_scenario(agent, f"gymnasium:{env}", f'envs = {envs}\nrecord = "episodes"')) == 0

    bare = getattr(stable_baselines3, kind.upper())
    model = bare("MlpPolicy", make_vec_env(env, n_envs=envs), seed=3, device="cpu", **OPTIONS[kind])
    model.learn(steps)

    complete = [episode for episode in episodes(tmp_path) if episode["complete"]]
    expected = [(info["r"], info["l"]) for info in model.ep_info_buffer]
    assert len(expected) > 1
    assert [(round(e["return"], 6), e["length"]) for e in complete] == [(float(r), int(n)) for r, n in expected]


def test_g10_eight_environments_share_numbers_episodes_and_draws(tmp_path):
    text = live_scenario('type = "ppo", trials = 803, rollout = 128', "tests.envs.helpers:LineServer", "envs = 8")
    assert train(tmp_path, text) == 0
    with Ledger.read(tmp_path / "out" / "r" / "ledger.db") as ledger:
        groups = [trial.group for trial in ledger.trials()]
    assert len(groups) == 800, "a ninth of a round is no round"
    assert [groups.count(n) for n in range(1, 161)] == [5] * 160
    records = episodes(tmp_path)
    assert [record["length"] for record in records] == [5] * 160
    assert [record["last"] for record in records] == sorted(record["last"] for record in records)


def test_g10_make_gives_a_vectorised_live_environment(tmp_path):
    path = write_scenario(tmp_path, live_scenario('type = "ppo", trials = 9'))
    same_step = {"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP}
    bare = gymnasium.make_vec("CartPole-v1", 3, vectorization_mode="sync", vector_kwargs=same_step)
    ours = loopwright.make(path, num_envs=3)
    assert ours.observation_space == bare.observation_space
    assert data_equivalence(ours.reset(seed=5)[0], bare.reset(seed=5)[0])
    for _ in range(60):
        step, other = ours.step(np.array([0, 1, 0])), bare.step(np.array([0, 1, 0]))
        assert all(data_equivalence(mine, theirs) for mine, theirs in zip(step[1:4], other[1:4], strict=True))
        assert data_equivalence("final_obs" in step[4], "final_obs" in other[4])
    ours.close()


@pytest.mark.parametrize("record", [pytest.param("steps", marks=pytest.mark.slow), "episodes"])
def test_s13_eight_environments_survive_a_kill_and_resume(tmp_path, record):
    agent = 'type = "ppo", trials = 6000, rollout = 256, checkpoint_every = 500, options = { n_epochs = 1 }'
    path = write_scenario(tmp_path, live_scenario(agent, more=f'envs = 8\nrecord = "{record}"'))
    process = subprocess.Popen(
        [sys.executable, "-m", "loopwright", "run", str(path), "--output", str(tmp_path / "out")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    ledger_path = tmp_path / "out" / "r" / "ledger.db"

    def has_begun():
        assert process.poll() is None, "it ended before it was killed"
        if not ledger_path.exists():
            return False
        with Ledger.read(ledger_path) as ledger:
            return ledger.last()[0] > 600

    wait_until(has_begun)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    with Ledger.read(ledger_path) as ledger:
        before = ledger.last()[0]

    assert resume(tmp_path) == 0

    assert check_ledger(ledger_path).message == ""
    with Ledger.read(ledger_path) as ledger:
        numbers = [trial.number for trial in ledger.trials()]
    assert before < 6000
    assert 5992 < numbers[-1] <= 6000
    if record == "steps":
        assert numbers == list(range(1, len(numbers) + 1))
    assert len(set(numbers)) == len(numbers)
    records = episodes(tmp_path)
    cut = [record for record in records if not record["complete"]]
    assert len(cut) <= 16, "those of the killed process and those at the end"
    lengths = sum(record["length"] for record in records)
    assert lengths <= 6000


def test_several_environments_need_stable_baselines_and_a_class(tmp_path):
    message = load_error(tmp_path, live_scenario('type = "ppo", library = "rllib", trials = 90', more="envs = 2"))
    assert "[run.live] envs: several environments need an RL agent with library = 'sb3'" in message
