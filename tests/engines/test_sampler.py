"""The sampler: exact, seeded, with the logprobs of the sampled distribution."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loopwright.engines.base import Sampling
from loopwright.engines.inprocess.sampler import Draw, likeliest, reshape, sample

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.5, -1.0, -3.0, -40.0, -torch.inf])


def chances(**sampling):
    return reshape(LOGITS[None], [Sampling(**sampling)])[0].exp().tolist()


@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 0.5}, {"temperature": 3.0}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.2},
     {"temperature": 1.5, "top_k": 5, "top_p": 0.9, "min_p": 0.1}],
    ids=["plain", "cold", "hot", "top_k", "top_p", "min_p", "all"],
)  # fmt: skip
def test_token_frequencies_match_their_logprobs(sampling):
    draws = 20_000
    requests = [Draw(Sampling(**sampling), "seed", position) for position in range(draws)]
    sample_set = sample(LOGITS.expand(draws, -1), requests)
    counts, expected = Counter(token for token, _ in sample_set), chances(**sampling)
    assert sum(expected) == pytest.approx(1.0)
    for token, logprob in set(sample_set):
        assert logprob == pytest.approx(math.log(expected[token]), abs=1e-5)
    for token, chance in enumerate(expected):
        deviation = math.sqrt(draws * chance * (1 - chance)) + 1e-9
        assert abs(counts[token] - draws * chance) < 5 * deviation


def test_top_logprobs_belong_to_the_sampled_distribution():
    settings = [{}, {"top_logprobs": 3}, {"top_logprobs": 5, "top_k": 2}, {"top_logprobs": 2, "temperature": 0}]
    draws = [Draw(Sampling(**each), "s", 0) for each in settings]
    nothing, three, two, one = likeliest(LOGITS.expand(4, -1), draws)
    assert nothing is None
    assert [token for token, _ in three[0]][:2] == [0, 1]
    assert [math.exp(logprob) for _, logprob in three[0]] == pytest.approx(sorted(chances(), reverse=True)[:3])
    assert [(token, math.exp(logprob)) for token, logprob in two[0]] == [
        (0, pytest.approx(chances(top_k=2)[0])),
        (1, pytest.approx(chances(top_k=2)[1])),
    ]
    assert one == (((0, 0.0),),)


def test_each_truncation_rule_keeps_the_right_tokens():
    def remaining(**sampling):
        return [token for token, chance in enumerate(chances(**sampling)) if chance > 0]

    assert remaining(top_k=3) == [0, 1, 2], "the first of two equally likely tokens"
    assert remaining(top_p=0.5) == [0]
    assert remaining(top_p=0.6) == [0, 1]
    assert remaining(min_p=0.3) == [0, 1]
    assert remaining(min_p=1.0) == [0]
    assert remaining(top_k=2, top_p=0.7) == [0], "the likelier of two has 0.73"


def test_impossible_tokens_are_never_sampled():
    logits = torch.zeros(1, 50_000)
    logits[0, 1:] = -25.0  # 7e-7 for all of them together
    requests = [Draw(Sampling(), "x", position) for position in range(300)]
    assert {token for token, _ in sample(logits.expand(300, -1), requests)} == {0}


def test_rounding_errors_do_not_change_tokens():
    torch.manual_seed(0)
    logits = torch.randn(64, 5000) * 2
    requests = [Draw(Sampling(), "x", position) for position in range(64)]
    disturbed = logits + torch.randn_like(logits) * 1e-6
    assert [t for t, _ in sample(logits, requests)] == [t for t, _ in sample(disturbed, requests)]


def test_a_row_does_not_depend_on_its_neighbours():
    torch.manual_seed(0)
    logits = torch.randn(6, 300)
    samplings = [Sampling(), Sampling(temperature=0), Sampling(top_k=4), Sampling(top_p=0.5), Sampling(top_k=1)]
    requests = [Draw(samplings[row % 5], str(row), row) for row in range(6)]
    together = sample(logits, requests)
    for row, draw in enumerate(requests):
        (alone,) = sample(logits[row : row + 1], [draw])
        assert alone[0] == together[row][0]
        assert alone[1] == pytest.approx(together[row][1], abs=1e-6)


@given(
    st.floats(0, 1e6) | st.floats(0, 1e-3),
    st.floats(0, 1, exclude_min=True),
    st.integers(0, 300),
    st.floats(0, 1),
    st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=20),
)
def test_any_settings_give_a_token_and_a_true_logprob(temperature, top_p, top_k, min_p, logits):
    sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    ((token, logprob),) = sample(torch.tensor([logits]), [Draw(sampling, "\ud800", 0)])
    assert 0 <= token < len(logits)
    assert math.isfinite(logprob)
    assert logprob <= 0
