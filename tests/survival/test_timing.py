"""The proposals of `random` do not depend on the order in which trials end, so that a resumed run repeats them."""

from random import Random
from types import SimpleNamespace

import pytest

from loopwright.agents.search.grid_random import RandomConfig, RandomSearch
from loopwright.core.outcome import Outcome
from loopwright.core.trial import Observation
from loopwright.envs.search import TrialRules
from loopwright.spaces.parameter import parameter
from loopwright.spaces.space import Space

TRIALS, PARALLEL = 60, 3


def proposals(timing, seed, good):
    """The points proposed when trials end in random order, and all but the first few points fail."""
    space = Space({"b": parameter(list(range(40)))}, (), frozenset())
    env = SimpleNamespace(space=space, rules=TrialRules())
    agent = RandomSearch(env, RandomConfig(trials=TRIALS, seed=seed), parallel=PARALLEL)
    random, running, points = Random(timing), [], []
    while True:
        while len(running) < PARALLEL and len(points) < TRIALS:
            action = agent.select_action(Observation({}, {}))
            if action is None:
                break
            points.append(action["b"])
            running.append((len(points), action))
        if not running:
            return points
        group, action = running.pop(random.randrange(len(running)))
        outcome = Outcome.OK if action["b"] < good else Outcome.CRASHED
        agent.update_policy(SimpleNamespace(group=group, action=action, regime={}, outcome=outcome))


@pytest.mark.parametrize("good", [0, 1, 2])
def test_s13_proposals_do_not_depend_on_the_order_in_which_trials_end(good):
    for seed in range(10):
        assert len({tuple(proposals(timing, seed, good)) for timing in range(8)}) == 1
