"""Readable samples for the report: a few episodes as conversations, sampled tokens shaded by their probability."""

from collections.abc import Mapping
from math import exp
from pathlib import Path
from typing import Any

from loopwright.core.episode import Episode, Node
from loopwright.engines.tokenizer import Tokenizer
from loopwright.ledger.ledger import Ledger
from loopwright.ledger.rollouts import Rollout, rollouts
from loopwright.reports.markup import Html, exact, html, join, number, short
from loopwright.reports.rollout.tokens import LEVELS, Piece, pieces, tokenizer_of

_TOKENS = 4000
_CHARS = 4000


def samples(folder: Path, engine: Mapping[str, Any]) -> Html:
    """The worst, the median and the best rollout, and the latest that has no reward."""
    with Ledger.read(folder / "ledger.db") as ledger:
        chosen = _chosen(ledger)
        found = {rollout.number: rollout for rollout in rollouts(ledger, list(chosen.values()))}
    tokenizer = tokenizer_of(engine, folder)
    shown = [sample(title, found[trial], tokenizer) for title, trial in chosen.items() if trial in found]
    if not shown:
        return Html("")
    return html("<h3>Samples</h3>{}{}", shades(), join(shown))


def _chosen(ledger: Ledger) -> dict[str, int]:
    """What to show, by the table of trials alone."""
    rows = ledger.transaction.rows
    scored = rows("SELECT count(reward) FROM trials")[0][0]
    query = "SELECT number FROM trials WHERE reward IS NOT NULL ORDER BY reward, number LIMIT 1 OFFSET ?"
    places = (
        {"worst": 0, "median": scored // 2, "best": scored - 1} if scored > 2 else dict.fromkeys(["first"][:scored], 0)
    )
    chosen = {title: rows(query, (place,))[0][0] for title, place in places.items()}
    without = rows(
        "SELECT number FROM trials WHERE reward IS NULL AND fault IS NOT NULL AND outcome <> 'aborted' "
        "ORDER BY number DESC LIMIT 1"
    )
    return chosen | ({"without a reward": without[0][0]} if without else {})


def shades() -> Html:
    """What the shades of tokens mean."""
    names = [*(f"p ≥ {least:g}" for least in LEVELS), f"p < {LEVELS[-1]:g}"]
    marks = [html("<span><i class='shade p{}'></i>{}</span>", place, name) for place, name in enumerate(names)]
    return html(
        "<div class='key'>{}<span><i class='shade given'></i>given, not sampled</span>"
        "<span>point at a token for its logprob</span></div>",
        join(marks),
    )


def sample(
    title: str, rollout: Rollout, tokenizer: Tokenizer | None, *, note: str = "", css: str = "", most: int = _TOKENS
) -> Html:
    """An episode to read: what came of it and the conversation, of which up to `most` sampled tokens."""
    episode = rollout.episode
    reward = "no reward" if episode.reward is None else f"reward {number(episode.reward.value)}"
    head = html(
        "<summary><b>{}</b>: {} <span class='muted'>trial {} · {} · {} tokens in {}</span></summary>",
        title.capitalize(),
        reward,
        rollout.number,
        short(episode.task.id, 80),
        number(episode.sampled),
        "1 turn" if episode.turns == 1 else f"{number(episode.turns)} turns",
    )
    facts = [note] if note else []
    facts += [f"{name} {number(value)}" for name, value in episode.rewards.items()]
    facts += [f"outcome {episode.outcome}"] + ([f"fault {episode.fault}"] if episode.fault else [])
    facts += [short(episode.reason)] if episode.reason else []
    facts += [] if episode.task.label is None else [f"label {short(exact(episode.task.label), 120)}"]
    return html(
        "<details class='{}' open>{}<p class='muted'>{}</p>{}</details>",
        f"sample {css}".strip(),
        head,
        " · ".join(facts),
        _conversation(episode, tokenizer, most),
    )


def _conversation(episode: Episode, tokenizer: Tokenizer | None, left: int) -> Html:
    """All branches, each without what an earlier one has shown."""
    seen: set[int] = set()
    paths = list(episode.branches())
    parts: list[Html] = []
    for place, path in enumerate(paths, 1):
        if len(paths) > 1:
            parts.append(html("<p class='muted'>branch {} of {}</p>", place, number(len(paths))))
        for index in path:
            if index in seen:
                continue
            seen.add(index)
            node = episode.nodes[index]
            if left <= 0:
                parts.append(html("<p class='muted'>… cut here; <code>loopwright episodes</code> shows it all</p>"))
                return join(parts)
            parts.append(_message(node, tokenizer, left))
            left -= node.sampled
    return join(parts)


def _message(node: Node, tokenizer: Tokenizer | None, most: int) -> Html:
    role = str(node.message.get("role", "?"))
    name = str(node.message.get("name") or "") if role == "tool" else ""
    if node.spans:
        body = join(map(_token, list(pieces(node, tokenizer))[:most]))
    else:
        content = node.message.get("content")
        text = content if isinstance(content, str) else "" if content is None else exact(content)
        body = html("<span class='given'>{}</span>", short(text, _CHARS))
    return html(
        "<div class='turn'><div class='role'>{} {}</div><div class='said mono'>{}</div></div>", role, name, body
    )


def _token(piece: Piece) -> Html:
    if piece.logprob is None:
        return html("<span class='given'>{}</span>", piece.text)
    told = f"logprob {number(piece.logprob, 4)}, p {number(exp(piece.logprob), 3)}"
    # A token that is nothing but a line break could not be pointed at.
    text = piece.text.replace("\n", "⏎\n") if not piece.text.strip("\n") else piece.text
    return html("<span class='p{}' title='{}'>{}</span>", piece.level, told, text)
