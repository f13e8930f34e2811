"""Signs of reward hacking in a batch: how often rollouts are cut off, repeat themselves or emit control tokens."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from statistics import StatisticsError, correlation, fmean

from loopwright.core.episode import Episode
from loopwright.core.outcome import Outcome

_NGRAM = 4


def monitor(episodes: Sequence[Episode], control_ids: AbstractSet[int]) -> dict[str, float]:
    """The numbers of a batch that reports watch; those that cannot be computed are missing."""
    scored = [(episode, episode.reward.value) for episode in episodes if episode.reward is not None]
    if not scored:
        return {}
    numbers = {"truncation_rate": fmean(episode.outcome is Outcome.TRUNCATED for episode, _ in scored)}
    with suppress(StatisticsError):  # all lengths or all rewards are equal, or there is one rollout
        numbers["length_reward"] = correlation([float(e.sampled) for e, _ in scored], [reward for _, reward in scored])
    nodes = [node for episode, _ in scored for node in episode.nodes if node.spans]
    turns = [[token for span in node.spans for token in node.ids[span.start : span.stop]] for node in nodes]
    if tokens := sum(map(len, turns)):
        if control_ids:
            # The last token of a turn ends it, as it should.
            numbers["control_rate"] = sum(token in control_ids for turn in turns for token in turn[:-1]) / tokens
        ngrams = [[tuple(turn[i : i + _NGRAM]) for i in range(len(turn) - _NGRAM + 1)] for turn in turns]
        if count := sum(map(len, ngrams)):
            numbers["repetition"] = 1 - sum(len({*each}) for each in ngrams) / count
    return numbers
