"""An episode in a terminal: facts, attempts, and the conversation with its tools and branches."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from loopwright.core.episode import Episode, Node
from loopwright.core.errors import printable
from loopwright.core.outcome import Outcome
from loopwright.ledger.ledger import Ledger
from loopwright.ledger.rollouts import Rollout, rejudgements, rollouts
from loopwright.reports.formatting import counted, duration, exact, number, short
from loopwright.reports.rollout.tokens import LEVELS, TokenText, token_texts, tokenizer_of

_ROLES = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}
_LEVELS = ("default", "green", "yellow", "bright_red", "bold white on red")
_USES = {
    (False, False): "neither trained on nor in its group's baseline",
    (False, True): "in its group's baseline, not trained on",
    (True, False): "trained on, not in the baseline",
}
"""What an episode is used for, by (trainable, in its group's baseline), unless it is both."""


def show(ledger: Ledger, numbers: Sequence[int], engine: Mapping[str, Any] | None) -> None:
    """Print these episodes; with an `engine`, token by token."""
    console = Console(highlight=False, emoji=False)
    tokenizer = None if engine is None else tokenizer_of(engine, ledger.path.parent)
    if engine is not None:
        legend = Text("tokens: ")
        names = [*(f"p ≥ {least:g}" for least in LEVELS), f"p < {LEVELS[-1]:g}"]
        for style, name in zip(_LEVELS, names, strict=True):
            legend.append(name, style).append("  ")
        console.print(legend.append("given, not sampled", "dim"))
    for rollout in rollouts(ledger, numbers):
        console.rule(_title(rollout), align="left", style="dim")
        for line in _facts(ledger, rollout):
            console.print(line)
        for place, path in enumerate(_branches(rollout.episode)):
            if len(list(rollout.episode.branches())) > 1:
                parent = rollout.episode.nodes[path[0]].parent
                after = f", after {len(rollout.episode.path(parent))} messages of an earlier one" if parent else ""
                console.print(Text(f"branch {place + 1}{after}", "bold"))
            for index in path:
                node = rollout.episode.nodes[index]
                texts = None if engine is None or not node.spans else list(token_texts(node, tokenizer))
                _message(console, node, texts)
        console.print()


def _title(rollout: Rollout) -> Text:
    episode = rollout.episode
    source = f" ({episode.task.data_source})" if episode.task.data_source else ""
    source += "" if rollout.evaluated is None else f" · evaluation after step {rollout.evaluated}"
    return Text.assemble(
        (f"trial {rollout.number}", "bold"), f" · group {episode.group} · {printable(episode.task.id)}{source}"
    )


def _facts(ledger: Ledger, rollout: Rollout) -> Iterator[Text]:
    episode = rollout.episode
    good = episode.outcome is Outcome.OK
    first = Text.assemble((str(episode.outcome), "green" if good else "bold red"))
    if episode.fault is not None:
        first.append(f", fault: {episode.fault}")
    first.append(f" · {_reward(episode.reward)}", "bold")
    first.append(f" · {counted(episode.sampled, 'token')} in {counted(episode.turns, 'turn')}")
    yield first
    if episode.reason:
        yield Text(f"reason: {printable(episode.reason)}", "red")
    if use := _USES.get((episode.trainable, episode.in_baseline)):
        yield Text(use, "yellow")
    if episode.task.label is not None:
        yield Text(f"label: {printable(short(exact(episode.task.label)))}")
    for place, attempt in enumerate(episode.attempts, 1):
        line = ", ".join(f"{name} {duration(seconds)}" for name, seconds in attempt.phases_s.items())
        if len(episode.attempts) > 1:
            reason = f" ({printable(attempt.reason)})" if attempt.reason else ""
            line = f"attempt {place} ended {attempt.outcome}{reason}: {line}"
        yield Text(line, "dim")
    for later in rejudgements(ledger, rollout.number):
        verdict = _reward(later.reward) if later.reward else f"no verdict: {printable(later.reason)}"
        yield Text(f"judged again ({later.id}): {verdict}", "magenta")


def _reward(reward: Any) -> str:
    if reward is None:
        return "no reward"
    parts = " + ".join(f"{name} {number(value)}" for name, value in reward.parts.items())
    return f"reward {number(reward.value)}" + (f" = {parts}" if len(reward.parts) > 1 else "")


def _branches(episode: Episode) -> list[tuple[int, ...]]:
    """The branches, each without what an earlier one has shown."""
    done: set[int] = set()
    branches = []
    for path in episode.branches():
        branches.append(tuple(index for index in path if index not in done))
        done.update(path)
    return branches


def _message(console: Console, node: Node, tokens: Sequence[TokenText] | None) -> None:
    role = str(node.message.get("role", "?"))
    name = f" {node.message['name']}" if role == "tool" and node.message.get("name") else ""
    finish = "" if node.finish in (None, "stop") else f" (ended by {node.finish})"
    console.print(Text(f"{printable(role + name)}{finish}", f"bold {_ROLES.get(role, 'white')}"))
    body = Text()
    if tokens is None:
        content = node.message.get("content")
        body.append(printable(content if isinstance(content, str) else "" if content is None else exact(content)))
    for token in tokens or ():
        body.append(printable(token.text), "dim" if token.level is None else _LEVELS[token.level])
    if body.plain:
        console.print(Padding(body, (0, 0, 0, 2), expand=False))
    for call in node.message.get("tool_calls") or () if tokens is None else ():
        function = call.get("function", {})
        line = f"→ {function.get('name')}({function.get('arguments', '')})"
        console.print(Padding(Text(printable(line), "yellow"), (0, 0, 0, 2), expand=False))
