"""What is learned is right (P01–P05): gradients, deadlines, what judges see, counts and the exported policy."""

from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import pytest

from loopwright.core.episode import Episode
from loopwright.core.outcome import Fault, Outcome
from loopwright.core.task import Task
from loopwright.engines.base import Chunk, Engine, EngineConfig, Sampling
from loopwright.engines.scripted import ScriptedConfig, ScriptedEngine
from loopwright.engines.tokenizer import ByteTokenizer
from loopwright.gateway.sessions.session import Session
from loopwright.rollouts.judgers.base import Payload
from loopwright.rollouts.loops.base import SingleTurn, SingleTurnConfig
from loopwright.rollouts.loops.tools import ToolLoop, ToolLoopConfig
from loopwright.rollouts.loops.worker import LoopWorker, RolloutRequest
from loopwright.testing import simulate

TASK = Task("t", ({"role": "user", "content": "How many <|im_start|> are there?"},), label="0")
START, END = ByteTokenizer.specials["<|im_start|>"], ByteTokenizer.specials["<|im_end|>"]


class IdEngine(Engine):
    """Samples given ids, a few at a time."""

    tokenizer = ByteTokenizer()

    def __init__(self, ids: Sequence[int]) -> None:
        super().__init__(EngineConfig(type="ids"), Path())
        self._ids = ids

    async def generate(self, ids: Sequence[int], sampling: Sampling, *, seed: str) -> AsyncGenerator[Chunk, None]:
        for start in range(0, len(self._ids), 3):
            part = tuple(self._ids[start : start + 3])
            yield Chunk(part, (-0.5,) * len(part), self.version)
        yield Chunk((), (), self.version, "stop")


def roll(ids: Sequence[int], **sampling: Any) -> Episode:
    """The episode of one turn with these ids."""
    loop = SingleTurn(SingleTurnConfig(sampling=Sampling(**sampling)), Path())
    return simulate(LoopWorker(loop, IdEngine(ids)).handle(RolloutRequest(TASK, "0")))


# -- P03: what judges see ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [{}, {"stop": ("never",)}], ids=["parsed at once", "parsed as it is sampled"])
def test_p03_control_tokens_are_not_text_for_a_judge_but_the_same_characters_are(sampling):
    typed = list(b"a <|im_start|> typed")
    ids = [START] * 24 + typed[:4] + [START, END] + typed[4:] + [END]
    episode = roll(ids, **sampling)
    facts = Payload.of(episode, ("answer", "messages", "tokens", "episode"))
    assert facts.answer == "a <|im_start|> typed", "decided by the token's id, not by its characters"
    assert facts.messages[-1]["content"] == facts.answer
    assert facts.episode.nodes[-1].ids[-len(ids) :] == tuple(ids), "what is trained on stays complete"
    assert facts.tokens == len(ids)
    assert facts.messages[0]["content"] == TASK.messages[0]["content"], "nor does a task lose what it says"


def test_p03_a_turn_of_control_tokens_alone_is_empty_and_streams_as_it_is_recorded():
    assert roll([START] * 24 + [END]).answer == ""

    async def main():
        session, shown = Session(IdEngine([START, *b"he", END, *b"llo", END]), Sampling(), seed="0"), []
        turn = await session.sample(session.draft(TASK.messages), shown.append)
        return turn, shown

    turn, shown = simulate(main())
    assert turn.text == "".join(delta.text for delta in shown) == "hello"
    assert tuple(token for delta in shown for token in delta.ids) == turn.ids


# -- P02: time --------------------------------------------------------------------------------------------------------


def roll_tools(directory: Path, nap_s: float, token_s: float, delay_s: float) -> Episode:
    """Two turns with a tool call of so many seconds between them, under a deadline of 20 s."""
    module = f"napping_{nap_s:.0f}_{delay_s:.0f}"
    (directory / f"{module}.py").write_text(f"""import asyncio

async def nap() -> str:
    await asyncio.sleep({nap_s})
    return "rested"

def speak(prompt, random):
    call = '<tool_call>{{"name": "nap", "arguments": {{}}}}</tool_call>'
    return "I am awake." if "rested" in prompt else call
""")
    engine = ScriptedConfig(script=f"{module}:speak", slip=0.0, token_s=token_s, delay_s=delay_s)
    loop = ToolLoop(ToolLoopConfig(tools=(f"{module}:nap",), deadline_s=20, tool_timeout_s=100), directory)

    async def main() -> Episode:
        worker = LoopWorker(loop, ScriptedEngine(engine, directory))
        try:
            return await worker.handle(RolloutRequest(TASK, "0"))
        finally:
            await worker.close()

    return simulate(main())


@pytest.mark.parametrize("nap_s", [1.0, 15.0, 25.0])
def test_p02_an_engine_at_a_tenth_of_its_speed_changes_only_the_time(tmp_path, nap_s):
    fast, slow = (roll_tools(tmp_path, nap_s, token_s=0.05 * n, delay_s=0.5 * n) for n in (1, 10))
    facts = ("answer", "messages", "tokens", "turns", "label")
    assert Payload.of(fast, facts).facts == Payload.of(slow, facts).facts, "a judge sees the same, so no reward changes"
    assert (fast.outcome, fast.fault, fast.reason) == (slow.outcome, slow.fault, slow.reason)
    engine_s = [episode.attempts[-1].phases_s["generate"] for episode in (fast, slow)]
    assert engine_s[1] == pytest.approx(10 * engine_s[0])
    assert engine_s[1] > 20, "more than the deadline, which is the policy's own time"
    if nap_s < 20:
        assert (fast.outcome, fast.answer) == (Outcome.OK, "I am awake.")
    else:  # nobody escapes a score by sleeping
        assert (fast.outcome, fast.fault) == (Outcome.TRUNCATED, Fault.POLICY)
        assert "it waited for tools" in fast.reason


def test_p02_an_engine_that_returns_nothing_loses_the_rollout_without_blaming_the_policy(tmp_path):
    episode = roll_tools(tmp_path, 1.0, token_s=0.0, delay_s=1000.0)
    assert (episode.outcome, episode.fault) == (Outcome.LOST, Fault.INFRA)
    assert "the engine sampled no token for 20 s" in episode.reason
