"""The collect agent's configuration."""

import pytest
from pydantic import ValidationError

from loopwright.rollouts.collect import CollectConfig


def test_fewer_trials_than_a_group_are_refused():
    with pytest.raises(ValidationError, match=r"`trials` \(3\) must be at least `group_size` \(4\)"):
        CollectConfig(trials=3, group_size=4)
    assert CollectConfig(trials=4, group_size=4).trials == 4
