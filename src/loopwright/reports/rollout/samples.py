"""Episodes to read: a few rollouts as conversations, sampled tokens shaded by their probability."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from loopwright.core.episode import Episode, Node
from loopwright.engines.tokenizer import Tokenizer
from loopwright.ledger.ledger import Ledger
from loopwright.ledger.rollouts import Rollout, rollouts
from loopwright.reports.formatting import counted, exact, number, short
from loopwright.reports.rollout.tokens import TokenText, token_texts

_TOKENS, _TASK_TOKENS = 4000, 1000
_CHARS = 4000


@dataclass(frozen=True)
class SampleMessage:
    """A message of a sample; without a role, a remark between messages."""

    role: str | None
    tokens: tuple[TokenText, ...] = ()
    text: str = ""


@dataclass(frozen=True)
class EpisodeSample:
    """An episode to read: its result and its conversation."""

    title: str
    reward: str
    summary: str
    facts: tuple[str, ...]
    messages: tuple[SampleMessage, ...]
    css: str = ""
    anchor: str = ""
    """What a link to it names; it is folded until then."""


def samples(ledger: Ledger, tokenizer: Tokenizer | None) -> list[EpisodeSample]:
    """The worst, the median and the best rollout, and the latest one without a reward."""
    rows = ledger.transaction.rows
    scored = rows("SELECT count(reward) FROM trials")[0][0]
    query = "SELECT number FROM trials WHERE reward IS NOT NULL ORDER BY reward, number LIMIT 1 OFFSET ?"
    places = {"worst": 0, "median": scored // 2, "best": scored - 1} if scored > 2 else {"first": 0} if scored else {}
    numbers = {title: rows(query, (place,))[0][0] for title, place in places.items()}
    without = rows(
        "SELECT number FROM trials WHERE reward IS NULL AND fault IS NOT NULL AND outcome <> 'aborted' "
        "ORDER BY number DESC LIMIT 1"
    )
    if without:
        numbers["without a reward"] = without[0][0]
    by_number = {rollout.number: rollout for rollout in rollouts(ledger, list(numbers.values()))}
    return [sample(title, by_number[trial], tokenizer) for title, trial in numbers.items() if trial in by_number]


def task_samples(ledger: Ledger, tokenizer: Tokenizer | None, trials: Sequence[int]) -> dict[int, EpisodeSample]:
    """These rollouts to read, each by the number of its trial, with an anchor for links."""
    title, run = "worst of its task", ledger.path.parent.name
    return {
        rollout.number: sample(title, rollout, tokenizer, most=_TASK_TOKENS, anchor=f"{run}-trial-{rollout.number}")
        for rollout in rollouts(ledger, trials)
    }


def sample(
    title: str,
    rollout: Rollout,
    tokenizer: Tokenizer | None,
    *,
    note: str = "",
    css: str = "",
    most: int = _TOKENS,
    anchor: str = "",
) -> EpisodeSample:
    """A rollout to read, with at most `most` of its sampled tokens."""
    episode = rollout.episode
    facts = [note] if note else []
    facts += [f"{name} {number(value)}" for name, value in episode.rewards.items()]
    facts += [f"outcome {episode.outcome}"] + ([f"fault {episode.fault}"] if episode.fault else [])
    facts += [short(episode.reason)] if episode.reason else []
    facts += [] if episode.task.label is None else [f"label {short(exact(episode.task.label), 120)}"]
    tokens = f"{number(episode.sampled)} tokens in {counted(episode.turns, 'turn')}"
    return EpisodeSample(
        title=title.capitalize(),
        reward="no reward" if episode.reward is None else f"reward {number(episode.reward.value)}",
        summary=f"trial {rollout.number} · {short(episode.task.id, 80)} · {tokens}",
        facts=tuple(facts),
        messages=tuple(_messages(episode, tokenizer, most)),
        css=css,
        anchor=anchor,
    )


def _messages(episode: Episode, tokenizer: Tokenizer | None, left: int) -> Iterator[SampleMessage]:
    """The messages of all branches, each once."""
    done: set[int] = set()
    paths = list(episode.branches())
    for place, path in enumerate(paths, 1):
        if len(paths) > 1:
            yield SampleMessage(None, text=f"branch {place} of {number(len(paths))}")
        for index in path:
            if index in done:
                continue
            done.add(index)
            if left <= 0:
                yield SampleMessage(None, text="… cut here; `loopwright episodes` shows all of it")
                return
            yield _message(episode.nodes[index], tokenizer, left)
            left -= episode.nodes[index].sampled


def _message(node: Node, tokenizer: Tokenizer | None, most: int) -> SampleMessage:
    role = str(node.message.get("role", "?"))
    name = str(node.message.get("name") or "") if role == "tool" else ""
    if node.spans:
        tokens = tuple(islice(token_texts(node, tokenizer), most))
    else:
        content = node.message.get("content")
        text = content if isinstance(content, str) else "" if content is None else exact(content)
        tokens = (TokenText(short(text, _CHARS)),)
    return SampleMessage(f"{role} {name}".strip(), tokens)
