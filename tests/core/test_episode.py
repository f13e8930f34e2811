"""The message graph: its rules, and its trainable tokens in any number of branches."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopwright.core.episode import ROOT, Attempt, Episode, Node, Span
from loopwright.core.outcome import Fault, Outcome
from loopwright.core.task import Task
from loopwright.core.trial import Reward

TASK = Task("t/0", ({"role": "user", "content": "2+2="},), {"answer": 4}, "sums", {"level": 1})
REWARD = Reward(0.5, {"exact": 1.0, "length": -0.5})


RUNS = st.lists(st.tuples(st.integers(1, 4), st.sampled_from([None, 0, 1, 2])), max_size=4)
"""How many tokens in a row were given (None) or sampled by which version."""


def node_of(parent, runs, first):
    """A node whose ids count up from `first`, so that each id is unique."""
    spans, stop = [], 0
    for length, version in runs:
        if version is not None:
            spans.append(Span(stop, stop + length, version))
        stop += length
    ids = tuple(range(first, first + stop))
    message = {"role": "assistant" if spans else "user", "content": f"{first}…"}
    return Node(parent, message, ids, tuple(-0.1 * i for i in ids), tuple(spans), "stop" if spans else None)


@st.composite
def episodes(draw):
    """Any tree of nodes with any mixture of sampled and inserted tokens."""
    nodes, first = [ROOT], 0
    for index, runs in enumerate(draw(st.lists(RUNS, max_size=9))):
        nodes.append(node_of(draw(st.integers(0, index)), runs, first))
        first += len(nodes[-1].ids)
    return Episode(TASK, tuple(nodes))


def joined(episode, path, what="ids"):
    return tuple(item for index in path for item in getattr(episode.nodes[index], what))


@given(episodes())
def test_each_sampled_token_is_exported_once_however_many_branches_share_it(episode):
    sampled = {i for node in episode.nodes for i, mark in zip(node.ids, node.mask, strict=True) if mark}
    rows = episode.rows()
    trained = [i for row in rows for i, mark in zip(row.response_ids, row.response_mask, strict=True) if mark]
    assert sorted(trained) == sorted(sampled)
    assert len(trained) == episode.sampled


@given(episodes())
def test_a_row_is_its_branch_token_by_token(episode):
    branches = {joined(episode, path): path for path in episode.branches()}
    for row in episode.rows():
        path = branches[row.prompt_ids + row.response_ids]
        count = len(row.prompt_ids)
        assert row.logprobs == joined(episode, path, "logprobs")[count:]
        assert row.versions == joined(episode, path, "versions")[count:]
        assert len(row.response_ids) == len(row.response_mask) == len(row.logprobs) == len(row.versions)
        assert row.response_mask[0] == 1
        assert all(version >= 0 for version, mark in zip(row.versions, row.response_mask, strict=True) if mark)


@given(episodes())
def test_branches_are_the_paths_to_the_leaves(episode):
    paths = list(episode.branches())
    assert len(set(paths)) == len(paths)
    assert {index for path in paths for index in path} == set(range(1, len(episode.nodes)))
    for path in paths:
        assert [episode.nodes[index].parent for index in path] == [0, *path[:-1]]


@given(episodes(), st.integers(0, 3))
def test_stale_tokens_are_kept_but_not_trained_on(episode, oldest):
    young = sum(s.stop - s.start for n in episode.nodes for s in n.spans if s.version >= oldest)
    rows = episode.rows(oldest)
    assert sum(sum(row.response_mask) for row in rows) == young
    everything = {(row.prompt_ids, row.response_ids, row.versions) for row in episode.rows()}
    for row in rows:
        assert (row.prompt_ids, row.response_ids, row.versions) in everything, "the prompt is unchanged"
        assert 1 in row.response_mask
        assert all(v >= oldest for v, mark in zip(row.versions, row.response_mask, strict=True) if mark)


def test_a_turn_of_two_versions_is_trained_on_from_the_newer_one():
    node = Node(
        1, {"role": "assistant", "content": "four"}, (7, 8, 9), (-1.0, -2.0, -3.0), (Span(0, 2, 1), Span(2, 3, 2))
    )
    episode = Episode(TASK, (ROOT, Node(0, TASK.messages[0], (1, 2), (0.0, 0.0)), node))
    (row,) = episode.rows(oldest=2)
    assert (row.prompt_ids, row.response_ids, row.response_mask) == ((1, 2), (7, 8, 9), (0, 0, 1))
    assert episode.rows(oldest=3) == []
    assert episode.oldest_version == 1
    assert episode.as_verl(oldest=2)[0]["response_mask"] == [0, 0, 1]


@given(episodes(), st.booleans())
def test_an_episode_survives_json(episode, judged):
    if judged:
        episode = episode.judged(Reward(0.5, {"a": 1.0}, (2.0,)))
    attempts = (Attempt(1.5, {"generate": 2.0}, Outcome.LOST, "gone"), Attempt(2.5, {}, None))
    episode = Episode(
        episode.task,
        episode.nodes,
        Outcome.TRUNCATED,
        Fault.POLICY,
        "too long",
        episode.reward,
        episode.trainable,
        episode.in_baseline,
        3,
        attempts,
    )
    assert Episode.from_bytes(episode.to_bytes()) == episode


class TestWhatCannotBe:
    def test_ids_without_logprobs(self):
        with pytest.raises(ValueError, match="2 ids but 1 logprobs"):
            Node(0, {}, (1, 2), (-0.5,))

    @pytest.mark.parametrize("logprob", [math.nan, -math.inf])
    def test_a_logprob_that_is_not_a_number(self, logprob):
        with pytest.raises(ValueError, match="not finite"):
            Node(0, {}, (1,), (logprob,))

    @pytest.mark.parametrize(
        "spans",
        [
            (Span(0, 4, 0),),
            (Span(1, 1, 0),),
            (Span(2, 3, 0), Span(0, 1, 0)),
            (Span(0, 2, 0), Span(1, 3, 1)),
            (Span(-1, 1, 0),),
        ],
        ids=["beyond the end", "empty", "out of order", "overlapping", "negative"],
    )
    def test_spans_that_do_not_follow_one_another(self, spans):
        with pytest.raises(ValueError, match="does not follow"):
            Node(0, {}, (1, 2, 3), (0.0,) * 3, spans)

    @pytest.mark.parametrize(
        "graph",
        [(), (ROOT, ROOT), (Node(0, {}),), (ROOT, Node(2, {}), Node(0, {})), (ROOT, Node(1, {})), (ROOT, Node(-1, {}))],
        ids=["no node", "two roots", "no root", "child before parent", "its own parent", "parent before all"],
    )
    def test_a_graph_that_is_not_a_tree(self, graph):
        with pytest.raises(ValueError, match=r"one root|before its parent"):
            Episode(TASK, graph)

    def test_a_root_with_tokens(self):
        with pytest.raises(ValueError, match="root of an episode has no tokens"):
            Episode(TASK, (Node(None, {}, (1,), (0.0,)),))

    @pytest.mark.parametrize("fact", ["trainable", "in_baseline"])
    def test_counting_without_a_reward(self, fact):
        with pytest.raises(ValueError, match="without a reward"):
            Episode(TASK, **{fact: True})


def answered_episode(**facts):
    reply = Node(1, {"role": "assistant", "content": "4"}, (5, 6), (-0.1, -0.2), (Span(1, 2, 0),), "stop")
    return Episode(TASK, (ROOT, Node(0, TASK.messages[0], (1, 2), (0.0, 0.0)), reply), **facts)


class TestWhatCounts:
    @pytest.mark.parametrize("fault", [None, Fault.POLICY])
    def test_outcomes_caused_by_the_policy_are_trained_on_and_count(self, fault):
        episode = answered_episode(fault=fault).judged(REWARD)
        assert (episode.trainable, episode.in_baseline) == (True, True)

    @pytest.mark.parametrize("fault", sorted(set(Fault) - {Fault.POLICY}))
    def test_other_outcomes_are_neither_trained_on_nor_counted(self, fault):
        episode = answered_episode(fault=fault).judged(REWARD)
        assert (episode.trainable, episode.in_baseline) == (False, False)

    def test_an_episode_without_tokens_counts_only_in_the_baseline(self):
        episode = Episode(TASK).judged(REWARD)
        assert (episode.trainable, episode.in_baseline) == (False, True)
        assert episode.rows() == []

    def test_a_failure_has_no_reward_and_does_not_count(self):
        episode = answered_episode().judged(REWARD).failed(Outcome.JUDGE_FAILED, Fault.JUDGE, "no verdict")
        assert episode.reward is None
        assert (episode.trainable, episode.in_baseline) == (False, False)
        assert (episode.outcome, episode.fault, episode.reason) == (Outcome.JUDGE_FAILED, Fault.JUDGE, "no verdict")
        assert episode.rows()[0].reward is None, "never a zero"


def test_the_answer_is_the_last_assistant_message():
    episode = answered_episode()
    assert episode.answer == "4"
    assert episode.messages() == [TASK.messages[0], {"role": "assistant", "content": "4"}]
    assert episode.turns == 1
    assert Episode(TASK).answer == ""
    assert Episode(TASK).messages() == []


def test_verl_gets_the_fields_that_it_knows():
    attempt = Attempt(0.0, {"generate": 1.5, "tools": 0.5})
    episode = answered_episode(attempts=(attempt,)).judged(REWARD)
    (row,) = episode.as_verl()
    assert row == {
        "prompt_ids": [1, 2, 5],
        "response_ids": [6],
        "response_mask": [1],
        "response_logprobs": [-0.2],
        "multi_modal_data": {},
        "reward_score": 0.5,
        "num_turns": 2,
        "metrics": {"generate_sequences": 1.5, "tool_calls": 0.5},
        "extra_fields": {
            "versions": [0],
            "reward_extra_info": {"exact": 1.0, "length": -0.5},
            "trainable": True,
            "in_baseline": True,
        },
    }
