"""What is learned is right (P01, P02, P03, P05): gradients, deadlines, what judges see, and counts."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from loopwright.core.episode import ROOT, Episode, Node, Span
from loopwright.core.outcome import Fault, Outcome
from loopwright.core.task import Task
from loopwright.core.trial import Reward
from loopwright.engines.base import Chunk, Engine, EngineConfig, Sampling
from loopwright.engines.scripted import ScriptedConfig, ScriptedEngine
from loopwright.engines.tokenizer import ByteTokenizer
from loopwright.gateway.sessions.session import Session
from loopwright.ledger.ledger import Ledger
from loopwright.ledger.steps import Step, steps
from loopwright.reports.training.before_after import trained_batches
from loopwright.reports.training.digest import always_truncated, hacking_signs, read_training, training_result, warnings
from loopwright.rollouts.evaluation import EvalConfig, rewards_by_kind
from loopwright.rollouts.group import Group
from loopwright.rollouts.judgers.base import Payload
from loopwright.rollouts.loops.base import SingleTurn, SingleTurnConfig
from loopwright.rollouts.loops.tools import ToolLoop, ToolLoopConfig
from loopwright.rollouts.loops.worker import LoopWorker, RolloutRequest
from loopwright.rollouts.tasks.mix import Prompt
from loopwright.testing import simulate
from loopwright.trainers.grpo import GrpoConfig, GrpoTrainer
from loopwright.trainers.sample import build_samples, scale_of
from loopwright.trainers.trainer import _Training, monitor
from tests.reports.test_training import Training
from tests.rollouts.harness import World, episode_of, tasks
from tests.trainers.conftest import _one_thread  # noqa: F401  a fixture
from tests.trainers.factories import learner_of, logprobs_of, samples

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
    assert "the engine sampled no token for 60 s" in episode.reason


# -- P01: gradients ---------------------------------------------------------------------------------------------------

pytestmark = pytest.mark.usefixtures("_one_thread")


def branched_episode(seed: int, reward: float) -> Episode:
    """A first turn, and after it one to three branches of different lengths: an answer, or a tool result and a turn."""
    random = Random(seed)

    def given(parent: int, role: str) -> Node:
        ids = tuple(random.randrange(1, 250) for _ in range(random.randint(2, 5)))
        return Node(parent, {"role": role, "content": ""}, ids, (0.0,) * len(ids))

    def sampled(parent: int) -> Node:
        ids = tuple(random.randrange(1, 250) for _ in range(random.randint(2, 6)))
        logprobs = (0.0, *(random.gauss(-5.5, 0.3) for _ in ids[1:]))
        return Node(parent, {"role": "assistant", "content": ""}, ids, logprobs, (Span(1, len(ids), 0),), "stop")

    nodes = [ROOT, given(0, "user"), sampled(1)]
    for _ in range(seed % 3 + 1):
        nodes += [given(2, "tool"), sampled(len(nodes))]
    return Episode(TASK, tuple(nodes)).judged(Reward(reward))


@pytest.mark.parametrize("length", ["episode", "token", "constant"])
def test_p01_branches_of_a_rollout_weigh_as_one_rollout_with_their_tokens(length):
    def weights(episodes: Sequence[Episode]) -> list[float]:
        numbered = dict(enumerate(episodes))
        batch = build_samples([numbered], [dict.fromkeys(numbered, 1.0)], version=0, oldest=None, length=length)
        scale = scale_of(batch, length, 8)
        return [sum(s.tokens * s.weight * scale for s in batch if s.episode == index) for index in numbered]

    branched, other = branched_episode(2, 1.0), branched_episode(3, 0.0)
    assert len(branched.rows()) == 3
    in_a_row = replace(  # the same turns one after another: a single branch
        branched,
        nodes=tuple(replace(node, parent=None if n == 0 else n - 1) for n, node in enumerate(branched.nodes)),
    )
    assert len(in_a_row.rows()) == 1
    assert weights([branched, other]) == pytest.approx(weights([in_a_row, other]))
    if length == "episode":
        assert weights([branched, other]) == pytest.approx([0.5, 0.5])


def test_p01_mismatch_is_exact_near_zero_and_its_largest_difference_is_shown(tmp_path):
    learner, batch = learner_of("grpo", tmp_path), samples()
    exact = [logprobs_of(learner.policy.model, sample)[0].detach() for sample in batch]
    near = []
    for sample, logprobs in zip(batch, exact, strict=True):
        recorded = sample.recorded.copy()
        recorded[sample.mask] = logprobs.numpy() + 1e-3
        near.append(replace(sample, recorded=recorded))
    metrics = learner.update(near, 1)
    assert metrics["mismatch_kl"] == pytest.approx(5e-7, rel=0.02)
    assert metrics["mismatch_max"] == pytest.approx(1e-3, rel=0.02)


# -- P02: evaluations that were cut off -----------------------------------------------------------------------------


def evaluate(directory: Path, *, hangs: bool) -> tuple[dict[str, Any], list[str], int]:
    """A process that evaluates step 0: its numbers, the warnings of the report, and how many rollouts there are."""

    async def roll(request: RolloutRequest) -> Episode:
        episode = episode_of(request.task, 0)
        late = hangs and request.task.id.endswith(("0", "1"))
        reason = "not finished within 5 s; it waited for tools"
        return replace(episode, outcome=Outcome.TRUNCATED, fault=Fault.POLICY, reason=reason) if late else episode

    async def main() -> tuple[dict[str, Any], list[str], int]:
        world = World(directory, roll, verdict=lambda e: float(e.fault is None), held_out={"h": tasks(8, "h")})
        world.env.evaluation = EvalConfig(tasks=({"type": "jsonl", "path": "h.jsonl"},))
        async with world:
            await _Training(GrpoTrainer(world.env, GrpoConfig(steps=3)))._evaluate(0)
            world.ledger.set_state("run", {"name": "r", "agent": {"type": "grpo", "steps": 3}, "rollout": {}})
            ((count,),) = world.ledger.transaction.rows("SELECT count(*) FROM trials")
            (step,) = steps(world.ledger, "eval")
            return dict(step.numbers), warnings(read_training(world.ledger)), count

    return simulate(main())


def test_p02_cuts_are_shown_beside_an_evaluation_and_resume_repeats_an_unreliable_one(tmp_path, caplog):
    numbers, lines, count = evaluate(tmp_path, hangs=True)
    assert (numbers["reward"], numbers["cuts"], numbers["unreliable"], count) == (0.75, 2, 1, 8)
    assert lines == [
        "The evaluation after step 0 is unreliable: of 8 rollouts, 2 were cut off by their deadline and 0 lost; "
        "`loopwright resume` repeats it."
    ]
    assert "unreliable" in caplog.text
    numbers, lines, count = evaluate(tmp_path, hangs=False)
    assert (numbers["reward"], numbers["cuts"], numbers.get("unreliable"), count) == (1.0, 0, None, 16)
    assert lines == []
    assert evaluate(tmp_path, hangs=True)[0] == numbers, "a reliable one is not repeated"


# -- P05: counts and warnings -----------------------------------------------------------------------------------------


def test_p05_counts_and_pictures_are_of_steps_that_learned(tmp_path):
    with closing(Ledger.create(tmp_path / "ledger.db")) as ledger:
        training = Training(ledger)
        for step, updates in enumerate((0.0, 1.0, 1.0, 0.0), 1):
            training.train(step, updates=updates, trained_episodes=4.0, episodes=4.0)
        digest = read_training(ledger)
        assert [step.step for step in digest.learned] == [2, 3]
        event, lines = training_result(digest)
        assert event["trained_rollouts"] == 8
        assert any(line.startswith("trained on 8 of 16 rollouts of 4 prompts") for line in lines)
        titles = [batch.title for batch in trained_batches(ledger, digest, None)]
    assert titles == ["What step 2 was trained on", "What step 3 was trained on"]


def test_p05_signs_of_reward_hacking_are_measured_and_warned_about(tmp_path):
    ids = [START] * 12 + [7, 8, 9, 10] * 6 + [END]
    node = Node(0, {}, tuple(ids), (-0.5,) * len(ids), (Span(0, len(ids), 0),), "length")
    hacked = Episode(TASK, (ROOT, node), Outcome.TRUNCATED, Fault.POLICY).judged(Reward(1.0))
    short = Episode(TASK, (ROOT, replace(node, ids=(1, END), logprobs=(0.0, 0.0), spans=(Span(0, 2, 0),))))
    numbers = monitor([hacked, hacked, short.judged(Reward(0.0))], frozenset({START, END}))
    assert numbers["truncation_rate"] == pytest.approx(2 / 3)
    assert numbers["length_reward"] == pytest.approx(1.0)
    assert numbers["control_rate"] == pytest.approx(24 / 76)
    assert numbers["repetition"] > 0.5
    lines = hacking_signs([Step(1, 0.0, {}), Step(2, 0.0, numbers)])
    assert len(lines) == 4
    assert lines[0].startswith("Possible reward hacking: 66.7 % of the rollouts were truncated")
    assert "control tokens" in lines[1]
    assert hacking_signs([Step(1, 0.0, monitor([short.judged(Reward(0.0))], frozenset({END})))]) == []


@pytest.mark.parametrize(("first", "is_hacking"), [(0.1, True), (0.9, False)])
def test_p05_rollouts_that_were_always_cut_off_are_no_sign_of_reward_hacking(first, is_hacking):
    train = [Step(step, 0.0, {"truncation_rate": first if step <= 10 else 0.95}) for step in range(1, 21)]
    signs, always = hacking_signs(train), always_truncated(train)
    assert (len(signs), len(always)) == (is_hacking, not is_hacking)
    assert "95 % of the rollouts were truncated" in (signs + always)[0]
    assert is_hacking or "raise the limits" in always[0]


def test_p05_a_kind_of_task_that_got_worse_is_named(tmp_path):
    with closing(Ledger.create(tmp_path / "ledger.db")) as ledger:
        training = Training(ledger)
        for step, letters in ((0, 0.9), (5, 0.2)):
            kinds = {
                f"reward[{kind}]{end}": mean + width
                for kind, mean in (("letters", letters), ("sums", 0.5), ("two tasks", letters))
                for end, width in (("", 0.0), ("_low", -0.1), ("_high", 0.1))
            } | {"reward[letters]_tasks": 6, "reward[two tasks]_tasks": 2}
            bounds = {"reward_low": 0.4, "reward_high": 0.8}
            training.steps.add("eval", Step(step, 0.0, {"reward": 0.6, "tasks": 8, **bounds, **kinds}))
        event, lines = training_result(read_training(ledger))
    assert "The policy got worse at 'letters': 0.9 (0.8 … 1) → 0.2 (0.1 … 0.3)." in lines
    assert not any(f"worse at '{kind}'" in line for line in lines for kind in ("sums", "two tasks"))
    assert any(line.startswith("reward[sums] 0.5 (95 %: 0.4 … 0.6)") for line in lines)
    assert event["held_out"][-1]["reward[letters]"] == 0.2


def test_p05_an_evaluation_has_a_reward_for_each_source_and_kind():
    groups = [
        Group(
            n,
            Prompt(f"eval:{source}", n, replace(TASK, data_source=kind)),
            1,
            {n: episode_of(TASK, 0).judged(Reward(reward))},
        )
        for n, (source, kind, reward) in enumerate((("a", "x", 1.0), ("a", "y", 0.0), ("b", "b", 0.5)))
    ]
    numbers = rewards_by_kind(groups, seed="0")
    means = {name: value for name, value in numbers.items() if name.endswith("]")}
    assert means == {"reward[a]": 0.5, "reward[b]": 0.5, "reward[x]": 1.0, "reward[y]": 0.0}
    assert rewards_by_kind(groups[:1], seed="0") == {}, "one kind has nothing to say beside the whole"
