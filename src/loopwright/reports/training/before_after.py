"""Episodes before and after training: the same held-out tasks side by side, and what a batch was learned from."""

from collections.abc import Sequence
from math import fsum

from loopwright.engines.tokenizer import Tokenizer
from loopwright.ledger.ledger import Ledger
from loopwright.ledger.rollouts import Rollout, rollouts
from loopwright.reports.background import part
from loopwright.reports.markup import Html, html, join, number
from loopwright.reports.rollout.samples import sample, shades
from loopwright.reports.rollout.tokens import tokenizer_of
from loopwright.reports.training.digest import Pair, TrainingDigest, signed

_TOKENS = 1200
"""Of each episode; so many of them stand in the page that it must be bounded."""
_STEEP = 0.5
"""From this share of its group's largest advantage on, an episode is shaded strongly."""


def before_after(digest: TrainingDigest, place: int) -> Html:
    """Episodes to read; where some are compared with others, with a switch between two ways of colouring tokens."""
    tokenizer = tokenizer_of(part(digest.rollout, "engine"), digest.folder)
    with Ledger.read(digest.folder / "ledger.db") as ledger:
        examined = _examined(ledger, digest, tokenizer)
        learned = _learned(ledger, tokenizer)
    if not examined and not learned:
        return Html("")
    key = _switch(place) if learned else shades()
    return html("<div class='episodes'><h3>Episodes</h3>{}{}{}</div>", key, examined, learned)


def _switch(place: int) -> Html:
    """Works by style alone, so that it does where scripts are off."""
    either = join(
        html("<label><input type='radio' name='shade-{}' class='by-{}'{}> {}</label>", place, name, checked, name)
        for name, checked in (("logprob", Html(" checked")), ("advantage", Html("")))
    )
    advantages = join(
        html("<span><i class='shade {}'></i>{}</span>", css, told)
        for css, told in (
            ("up2", "much better than its group"),
            ("up1", "better"),
            ("down1", "worse"),
            ("down2", "much worse"),
        )
    )
    return html(
        "<div class='key switch'><span>colour tokens by</span>{}</div><div class='of-logprob'>{}</div>"
        "<div class='key of-advantage'>{}<span>only what was trained on has an advantage</span></div>",
        either,
        shades(),
        advantages,
    )


def _examined(ledger: Ledger, digest: TrainingDigest, tokenizer: Tokenizer | None) -> Html:
    """The first and the last evaluation's episode of a few tasks."""
    if digest.ends is None or not digest.pairs:
        return Html("")
    first, last = digest.ends
    columns = []
    for title, pair in _chosen(digest.pairs):
        found = {rollout.number: rollout for rollout in rollouts(ledger, [pair.before, pair.after])}
        shown = [
            sample(
                f"after step {number(end.step)}" if end.step else "before training",
                found[trial],
                tokenizer,
                most=_TOKENS,
            )
            for end, trial in ((first, pair.before), (last, pair.after))
            if trial in found
        ]
        change = f"mean reward {number(pair.rewards[0], 3)} → {number(pair.rewards[1], 3)}"
        columns.append(html("<h4>{} <small>{}</small></h4><div class='pair'>{}</div>", title, change, join(shown)))
    return join(columns)


def _chosen(pairs: Sequence[Pair]) -> list[tuple[str, Pair]]:
    """The held-out tasks that changed most for the better and for the worse, and one between them."""
    ordered = sorted(pairs, key=lambda pair: (-pair.change, pair.before))
    if len(ordered) < 3:
        return [("Held-out task", pair) for pair in ordered]
    names = ("the largest gain", "the median", "the smallest gain" if ordered[-1].change >= 0 else "the largest loss")
    places = (0, len(ordered) // 2, len(ordered) - 1)
    return [(f"Held-out task with {name}", ordered[place]) for name, place in zip(names, places, strict=True)]


def _learned(ledger: Ledger, tokenizer: Tokenizer | None) -> Html:
    """The best and the worst rollout of a group that the first step was learned from, and of one of the last."""
    rows = ledger.transaction.rows
    if not rows("SELECT 1 FROM sqlite_schema WHERE name = 'groups'"):
        return Html("")
    parts = []
    for step in dict.fromkeys(rows("SELECT min(step), max(step) FROM groups")[0]):
        widest = rows(
            "SELECT groups.grp FROM groups JOIN trials ON trials.grp = groups.grp WHERE step = ? "
            "AND reward IS NOT NULL GROUP BY groups.grp ORDER BY max(reward) - min(reward) DESC, groups.grp LIMIT 1",
            (step,),
        )
        if step is None or not widest:
            continue
        numbers = rows("SELECT number FROM trials WHERE grp = ? ORDER BY number", widest[0])
        group = [one for one in rollouts(ledger, [trial for (trial,) in numbers]) if one.episode.reward is not None]
        counted = [_reward(one) for one in group if one.episode.in_baseline]
        if not counted or len(group) < 2:  # a rollout alone has nothing to be better than
            continue
        mean = fsum(counted) / len(counted)
        largest = max(abs(_reward(one) - mean) for one in group)
        ends = {"best": max(group, key=_reward), "worst": min(group, key=_reward)}
        shown = [
            sample(
                f"{title} of {number(len(group))}",
                one,
                tokenizer,
                note=f"advantage {signed(_reward(one) - mean)}, against a group mean of {number(mean, 3)}",
                css=_shade(_reward(one) - mean, largest),
                most=_TOKENS,
            )
            for title, one in ends.items()
        ]
        title = f"What step {number(step)} was learned from"
        told = "the group whose rewards were furthest apart"
        parts.append(html("<h4>{} <small>{}</small></h4><div class='pair'>{}</div>", title, told, join(shown)))
    return join(parts)


def _reward(rollout: Rollout) -> float:
    reward = rollout.episode.reward
    return 0.0 if reward is None else reward.value


def _shade(advantage: float, largest: float) -> str:
    if not advantage:
        return ""
    return ("up" if advantage > 0 else "down") + ("2" if abs(advantage) >= _STEEP * largest else "1")
