"""The samples of a learner: every sampled token once, and no other."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopwright.core.episode import ROOT, Episode, Node, Span
from loopwright.core.task import Task
from loopwright.core.trial import Reward
from loopwright.trainers.failure import TrainingFailed
from loopwright.trainers.sample import build_samples, micro_batches, scale_of, shares, split
from tests.trainers.factories import samples

TASK = Task("t", ({"role": "user", "content": "?"},))


def node(parent, ids, sampled=False, version=0):
    logprobs = tuple(-0.1 * (1 + i) if sampled else 0.0 for i in range(len(ids)))
    spans = (Span(0, len(ids), version),) if sampled else ()
    return Node(parent, {"role": "assistant" if sampled else "user", "content": ""}, tuple(ids), logprobs, spans)


def forked(versions=(0, 0, 0)):
    """A prompt, a turn, and two continuations."""
    nodes = (
        ROOT,
        node(0, [1, 2]),
        node(1, [3, 4], True, versions[0]),
        node(2, [5, 6, 7], True, versions[1]),
        node(2, [8], True, versions[2]),
    )
    return Episode(TASK, nodes).judged(Reward(1.0))


def test_every_sampled_token_is_in_one_sample():
    batch = build_samples([{7: forked()}], [{7: 2.0}], version=0, oldest=None)
    trained = [int(i) for sample in batch for i in sample.ids[sample.mask]]
    assert sorted(trained) == [3, 4, 5, 6, 7, 8]
    assert {sample.advantage for sample in batch} == {2.0}
    assert [float(v) for v in batch[1].recorded[batch[1].mask]] == pytest.approx([-0.1])


def test_branches_of_an_episode_share_its_weight():
    batch = build_samples([{7: forked()}], [{7: 2.0}], version=0, oldest=None)
    assert sum(sample.weight * sample.tokens for sample in batch) == pytest.approx(1.0)
    assert scale_of(batch, "episode", 10) == 1.0
    assert scale_of(batch, "token", 10) == 1 / 6
    assert scale_of(batch, "constant", 10) == 1 / 10


def test_stale_tokens_stay_in_the_row_and_are_not_trained_on():
    batch = build_samples([{7: forked((3, 5, 5))}], [{7: 2.0}], version=6, oldest=[5])
    assert sorted(int(i) for sample in batch for i in sample.ids[sample.mask]) == [5, 6, 7, 8]
    assert {sample.staleness for sample in batch} == {1}


def test_episodes_sampled_with_other_settings_are_refused():
    """A user's loop may sample with any settings; its logprobs would be those of another policy."""
    cold = replace(node(1, [3], True), sampling={"temperature": 0.5})
    episode = Episode(TASK, (ROOT, node(0, [1, 2]), cold)).judged(Reward(1.0))
    assert build_samples([{7: episode}], [{7: 1.0}], version=0, oldest=None, temperature=0.5)
    for sample, temperature in ((episode, 1.0), (forked(), 0.5)):
        with pytest.raises(
            TrainingFailed, match=r"task 't' was sampled with temperature .* but the policy is trained at temp"
        ):
            build_samples([{7: sample}], [{7: 1.0}], version=0, oldest=None, temperature=temperature)


def test_the_order_of_completion_does_not_matter():
    """A step that is repeated after a crash has its episodes in the order of the ledger."""
    one, two, three = (Episode(TASK, (ROOT, node(0, [n], True))).judged(Reward(1.0)) for n in (1, 2, 3))
    orders = [{7: one, 8: two}, {9: three}], [{9: three}, {8: two, 7: one}]
    first, second = (
        build_samples(order, [dict.fromkeys((7, 8, 9), 1.0)] * 2, version=0, oldest=None) for order in orders
    )
    assert [(list(s.ids), s.episode) for s in first] == [(list(s.ids), s.episode) for s in second]


def test_untrainable_episodes_are_left_out():
    episode = replace(forked(), trainable=False)
    assert build_samples([{7: episode, 8: forked()}], [{7: 1.0, 8: 1.0}], version=0, oldest=None)[0].episode == 1
    assert build_samples([{7: forked()}], [{}], version=0, oldest=None) == []


@settings(deadline=None)
@given(st.integers(1, 20), st.integers(1, 6), st.integers(1, 40), st.integers(1, 4))
def test_splitting_a_batch_loses_nothing(count, parts, most_tokens, workers):
    batch = samples(count, rows=2)
    for parts_list in (split(batch, parts, "seed"), micro_batches(batch, most_tokens), shares(batch, workers)):
        assert sorted(map(id, batch)) == sorted(id(sample) for part in parts_list for sample in part)
    for part in split(batch, parts, "seed"):
        whole = {sample.episode for sample in part}
        assert sum(sample.episode in whole for sample in batch) == len(part)
    for micro in micro_batches(batch, most_tokens):
        assert len(micro) == 1 or len(micro) * max(len(sample.ids) for sample in micro) <= most_tokens
