"""The ledger's groups and a model in memory: each group is used once, oldest version first; a crash changes nothing."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from loopwright.core.outcome import Outcome
from loopwright.core.trial import Result, Reward, Trial
from loopwright.ledger.groups import Groups
from loopwright.ledger.ledger import Ledger
from tests.rollouts.memory_buffer import MemoryBuffer


@pytest.fixture(params=["memory", "ledger"])
def buffer(request, tmp_path):
    if request.param == "memory":
        yield MemoryBuffer()
        return
    with Ledger.create(tmp_path / "ledger.db") as ledger:
        yield Groups(ledger)


def open_groups(buffer, *numbers, source="t"):
    for number in numbers:
        buffer.open(number, source, [Trial(number, {}, "", number)])


def test_the_oldest_version_is_taken_first(buffer):
    open_groups(buffer, 1, 2, 3)
    buffer.ready(1, 5)
    buffer.ready(2, 3)
    assert buffer.take(1, 1) == [2]
    assert buffer.take(9, 1) == [1]
    assert buffer.take(9, 1) == []
    assert buffer.unfinished() == [3]


def test_l09_groups_taken_after_the_checkpoint_return_and_trained_ones_do_not(buffer):
    open_groups(buffer, 1, 2, 3, 4)
    for number in (1, 2, 3):
        buffer.ready(number, 0)
    assert buffer.take(1, 1) == [1]
    assert buffer.take(2, 2) == [2, 3]
    buffer.restore(1)
    assert buffer.counts() == {"trained": 1, "ready": 2, "open": 1}
    assert buffer.take(9, 2) == [2, 3]


def test_l09_the_groups_of_a_step_can_be_found_when_its_checkpoint_is_lost(buffer):
    open_groups(buffer, 1, 2, 3)
    for number in (1, 2, 3):
        buffer.ready(number, 0)
    buffer.take(2, 1)
    buffer.take(1, 2)
    buffer.settle(2)
    assert [buffer.groups_of_step(step) for step in (1, 2, 3)] == [[1, 2], [3], []]


def test_l08_stale_groups_expire_and_their_prompts_are_retried(buffer):
    open_groups(buffer, 1, 2)
    buffer.ready(1, 0)
    buffer.ready(2, 2)
    assert buffer.expire(1) == [1]
    assert buffer.expired() == [1]
    buffer.open(3, "t", [Trial(3, {}, "", 3)], again=1)
    assert buffer.expired() == []
    assert buffer.draws() == {"t": 2}, "a retried prompt was drawn once"
    assert buffer.waiting == 1


@pytest.mark.parametrize("move", ["ready", "close"])
def test_a_group_is_closed_once(buffer, move):
    open_groups(buffer, 1)
    buffer.close(1, "failed")
    with pytest.raises(ValueError, match="group 1 is not open"):
        buffer.ready(1, 0) if move == "ready" else buffer.close(1, "filtered")


def test_trials_of_a_filtered_group_are_marked_and_keep_their_rewards(tmp_path):
    with Ledger.create(tmp_path / "ledger.db") as ledger:
        groups = Groups(ledger)
        trials = [Trial(number, {}, "", 1, number) for number in (1, 2)]
        groups.open(1, "t", trials)
        ledger.commit(trials[0], Result(Outcome.OK, reward=Reward(0.5), episode=b"{}"))
        ledger.commit(trials[1], Result(Outcome.LOST, reason="gone", episode=b"{}"))
        groups.close(1, "filtered")
        assert [(t.outcome, t.reward and t.reward.value) for t in ledger.trials()] == [
            (Outcome.FILTERED, 0.5),
            (Outcome.LOST, None),
        ]


class BothAgree(RuleBasedStateMachine):
    """After any sequence of operations, the memory buffer and the ledger buffer agree."""

    def __init__(self):
        super().__init__()
        self.ledger = Ledger.create(self.path())
        self.buffers = (MemoryBuffer(), Groups(self.ledger))
        self.number = self.step = 0

    def path(self):
        self.directory = tempfile.TemporaryDirectory()
        return Path(self.directory.name) / "ledger.db"

    def both(self, call):
        memory, ledger = map(call, self.buffers)
        assert memory == ledger
        return memory

    @rule(source=st.sampled_from("ab"))
    def open(self, source):
        self.number += 1
        expired = self.both(lambda b: b.expired())
        again = expired[0] if expired else None
        for buffer in self.buffers:
            buffer.open(self.number, source, [Trial(self.number, {}, "", self.number)], again=again)

    @rule(version=st.integers(0, 3), data=st.data())
    def finish(self, version, data):
        if groups := self.both(lambda b: b.unfinished()):
            group = data.draw(st.sampled_from(groups))
            how = data.draw(st.sampled_from(["ready", "failed", "filtered"]))
            for buffer in self.buffers:
                buffer.ready(group, version) if how == "ready" else buffer.close(group, how)

    @rule()
    def take_all(self):
        self.step += 1
        self.both(lambda b: b.take(10_000, self.step))

    @rule(before=st.integers(0, 4))
    def expire(self, before):
        self.both(lambda b: b.expire(before))

    @rule(back=st.integers(0, 2))
    def settle(self, back):
        for buffer in self.buffers:
            buffer.settle(self.step - back)

    @rule(back=st.integers(0, 2))
    def crash(self, back):
        self.step = max(0, self.step - back)
        for buffer in self.buffers:
            buffer.restore(self.step)
        self.buffers = (self.buffers[0], Groups(self.ledger))

    @invariant()
    def same(self):
        self.both(lambda b: (b.waiting, b.unfinished(), b.expired(), b.draws(), b.counts()))
        self.both(lambda b: [b.groups_of_step(step) for step in range(self.step + 3)])

    def teardown(self):
        self.ledger.close()
        self.directory.cleanup()


BothAgree.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
test_both_agree = BothAgree.TestCase
