"""The changes of a rejudged run, counted group by group."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopwright.core.trial import Reward
from loopwright.rollouts.rejudge import Change, Changes

SCORES = st.one_of(st.none(), st.integers(-3, 3).map(float))


def change(trial: int, before: float | None, after: float | None) -> Change:
    was, now = (None if value is None else Reward(value, {"exact": value}) for value in (before, after))
    return Change(trial, 1, f"task-{trial}", was, now, "" if now else "no verdict")


def changes_of(*pairs: tuple[float | None, float | None]) -> Changes:
    changes = Changes()
    changes.add([change(number, *pair) for number, pair in enumerate(pairs, 1)])
    return changes


def test_a_failed_verdict_is_not_zero():
    changes = changes_of((1.0, None), (1.0, 3.0))
    assert (changes.newly_failed, changes.both) == (1, 1)
    assert changes.means == (1.0, 3.0)
    assert changes.reasons == {"no verdict": 1}


def test_newly_scored_episodes_do_not_change_the_mean():
    changes = changes_of((None, 5.0), (None, None), (0.0, 0.0))
    assert (changes.newly_scored, changes.still_failed, changes.changed) == (1, 1, 0)
    assert changes.means == (0.0, 0.0)


def test_flips_are_counted_within_a_group():
    changes = changes_of((0.0, 1.0), (1.0, 0.0), (0.5, 0.5))
    assert (changes.pairs, changes.flipped_pairs, changes.flipped_signs, changes.new_best) == (3, 3, 2, 1)


def test_a_shift_of_all_rewards_flips_nothing():
    changes = changes_of((0.0, 10.0), (1.0, 11.0), (1.0, 11.0))
    assert changes.up == 3
    assert (changes.flipped_pairs, changes.flipped_signs, changes.new_best) == (0, 0, 0)


def test_the_largest_changes_come_first():
    changes = changes_of(*((0.0, float(size)) for size in range(20)))
    assert [one.trial for one in changes.largest] == list(range(20, 10, -1))


@given(st.lists(st.tuples(SCORES, SCORES), max_size=12))
def test_every_episode_is_counted_once(pairs):
    changes = changes_of(*pairs)
    assert changes.episodes == len(pairs)
    assert changes.both + changes.newly_scored + changes.newly_failed + changes.still_failed == len(pairs)
    assert changes.up + changes.down <= changes.both
    back = changes_of(*((after, before) for before, after in pairs))
    assert (back.up, back.flipped_pairs, back.flipped_signs) == (
        changes.down,
        changes.flipped_pairs,
        changes.flipped_signs,
    )
    if changes.means:
        assert changes.means == pytest.approx(back.means[::-1])
