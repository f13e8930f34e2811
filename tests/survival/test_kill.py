"""`kill -9` at any moment, then `resume`: the same trials as without the kill, and nothing left running."""

import pytest

from tests.survival.campaign import SCENARIO, Campaign, kill_repeatedly

LISTS = "a = [1, 2, 3, 4, 5]\nb = [{}]"
TINY = "a = [3, 4]\nb = [1, 2, 3, 4, 5]"
WIDE = "a = { low = 1, high = 9, dtype = 'int' }\nb = { low = 0, high = 400, dtype = 'int' }"
ONE = '{ type = "identity", metrics = ["y"] }'
TWO = '[{ type = "identity", metrics = ["y"] }, { type = "negative", metrics = ["z"] }]'


def scenario(agent, args, *, parallel=1, reward=ONE, run="", workload="", more=""):
    return SCENARIO.format(
        agent=agent, args=args, parallel=parallel, reward=reward, run=run, workload=workload, more=more
    )


def cases(trials):
    """The kinds of campaign that kills must not affect, by name."""
    # Small enough for duplicates and, at a = 3, for failures that must not be proposed again.
    lists = LISTS.format(", ".join(map(str, range(trials // 5))))
    weights = [0.4, 0.3, 0.1, 0.1, 0.1]
    return {
        "random": scenario(f'{{ type = "random", trials = {trials}, seed = 3 }}', lists, parallel=2),
        "grid": scenario('{ type = "grid" }', lists, parallel=2),
        "tpe": scenario(f'{{ type = "tpe", trials = {trials}, seed = 5 }}', WIDE),
        "constrained": scenario(
            f'{{ type = "random", trials = {trials}, seed = 9, start = "first" }}',
            lists,
            parallel=2,
            workload=f'constraints = ["a + b < {trials // 6}"]',
        ),
        "env_params": scenario(
            f'{{ type = "random", trials = {trials}, seed = 4 }}',
            lists,
            parallel=2,
            more=f"[run.env_params.a]\nweights = {weights}",
        ),
        "repeats": scenario(f'{{ type = "random", trials = {trials}, seed = 6 }}', WIDE, parallel=2, run="repeats = 3"),
        "cmaes": scenario(f'{{ type = "cmaes", trials = {trials}, seed = 7 }}', WIDE),
        "nsga2": scenario(f'{{ type = "nsga2", trials = {trials}, seed = 8, population = 8 }}', WIDE, reward=TWO),
        "penalised": scenario(
            f'{{ type = "tpe", trials = {trials}, seed = 2 }}', WIDE, more="[run.rewards]\nmetric_failure = -5.0"
        ),
        "bandit": scenario(
            f'{{ type = "bandit", trials = {trials}, seed = 8 }}', TINY, more="[run.env_params.b]\nencoding = 'scalar'"
        ),
    }


def survives(tmp_path, text, kills, within_s, seed):
    calm = Campaign(tmp_path / "calm", text)
    assert calm.call().code == 0
    stormy = Campaign(tmp_path / "stormy", text)

    hits = kill_repeatedly(stormy, kills, within_s=within_s, seed=seed)

    assert stormy.result() == calm.result()
    assert stormy.numbers() == list(range(1, len(calm.trials()) + 1))
    assert stormy.left_running() == []
    print(f"{hits} kills, {len(calm.trials())} trials")
    return hits


@pytest.mark.parametrize("kind", ["random", "grid", "tpe"])
def test_s13_a_few_kills_change_nothing(tmp_path, kind):
    assert survives(tmp_path, cases(60)[kind], kills=5, within_s=0.3, seed=11) >= 3


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", cases(30))
def test_s13_fifty_kills_change_nothing(tmp_path, kind):
    assert survives(tmp_path, cases(600)[kind], kills=50, within_s=0.3, seed=12) == 50
