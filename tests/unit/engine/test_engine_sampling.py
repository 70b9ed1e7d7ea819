"""The one number a token is drawn with, and what is drawn with it."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.engine.sampling import pack, sample, uniforms, unpack
from agentrl.seeds import counter_uniform, turn_seed


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**31)), min_size=1, max_size=20))
def test_the_vectorised_uniform_numbers_equal_the_scalar_ones_bit_for_bit(pairs):
    seeds, positions = (np.array(column, dtype=np.uint64) for column in zip(*pairs, strict=True))
    assert uniforms(seeds, positions).tolist() == [counter_uniform(seed, position) for seed, position in pairs]


def test_the_seeds_of_turns_fit_the_vectorised_form():
    seeds = [turn_seed(3, turn) for turn in range(50)]
    drawn = uniforms(np.array(seeds, dtype=np.uint64), np.zeros(50, dtype=np.uint64))
    assert drawn.tolist() == [counter_uniform(seed, 0) for seed in seeds]
    assert 0.3 < drawn.mean() < 0.7


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 0), (0.0999, 0), (0.1, 1), (0.2999, 1), (0.3001, 2), (0.9999999, 2)])
def test_a_token_is_the_first_whose_cumulative_probability_exceeds_its_number(uniform, token):
    logits = torch.tensor([[0.1, 0.2, 0.7]]).log()
    tokens, logprobs = sample(logits, torch.ones(1), torch.tensor([uniform], dtype=torch.float64))
    assert tokens.tolist() == [token]
    assert logprobs[0].item() == pytest.approx(math.log([0.1, 0.2, 0.7][token]), abs=1e-6)


def test_a_temperature_bends_the_distribution_and_the_log_prob():
    # probabilities .2 and .8 at temperature 1 are 1/17 and 16/17 at temperature 1/2
    logits = torch.tensor([0.2, 0.8]).log().expand(2, 2)
    tokens, logprobs = sample(logits, torch.full((2,), 0.5), torch.tensor([1 / 17 - 1e-6, 1 / 17 + 1e-6], dtype=torch.float64))
    assert tokens.tolist() == [0, 1]
    assert logprobs.exp().tolist() == pytest.approx([1 / 17, 16 / 17], abs=1e-6)


def test_temperature_zero_takes_the_likeliest_and_tells_its_log_prob_at_temperature_one():
    logits = torch.tensor([[0.2, 0.5, 0.3], [0.2, 0.5, 0.3]]).log()
    tokens, logprobs = sample(logits, torch.tensor([0.0, 1.0]), torch.tensor([0.99, 0.99], dtype=torch.float64))
    assert tokens.tolist() == [1, 2]
    assert logprobs.exp().tolist() == pytest.approx([0.5, 0.3], abs=1e-6)


def test_a_token_of_probability_zero_is_never_drawn():
    logits = torch.tensor([[0.0, 0.0, -1e9]])
    tokens, _ = sample(logits, torch.ones(1), torch.tensor([1 - 2**-53], dtype=torch.float64))
    assert tokens.tolist() == [1]


def test_logits_that_are_no_numbers_show_in_the_log_prob():
    _, logprobs = sample(torch.tensor([[float("nan"), 0.0], [0.0, 0.0]]), torch.ones(2), torch.tensor([0.5, 0.5], dtype=torch.float64))
    assert [math.isfinite(logprob) for logprob in logprobs.tolist()] == [False, True]


def test_ten_thousand_draws_have_the_distribution():
    seeds, positions = np.full(10_000, 7, dtype=np.uint64), np.arange(10_000, dtype=np.uint64)
    logits = torch.tensor([0.05, 0.15, 0.8]).log().expand(10_000, 3)
    tokens, _ = sample(logits, torch.ones(10_000), torch.from_numpy(uniforms(seeds, positions)))
    shares = tokens.bincount(minlength=3) / 10_000
    assert shares.tolist() == pytest.approx([0.05, 0.15, 0.8], abs=0.02)


@pytest.mark.parametrize(("rows", "vocabulary"), [(300, 200), (300, 1024), (300, 1000)], ids=["at once", "whole blocks", "a part of a block"])
def test_a_drawn_token_is_what_the_whole_cumulative_distribution_says(rows, vocabulary):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, vocabulary, generator=generator).mul(3).expand(rows, -1)
    numbers = torch.cat([torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64), torch.rand(rows - 2, dtype=torch.float64, generator=generator)])
    tokens, logprobs = sample(logits, torch.ones(rows), numbers)
    cumulative = logits[0].softmax(-1).double().cumsum(-1)
    assert torch.equal(tokens, torch.searchsorted(cumulative, numbers * cumulative[-1] * (1 - 2**-52), right=True))
    assert torch.allclose(logprobs, logits[0].log_softmax(-1)[tokens], atol=1e-5, rtol=0)


def test_whole_blocks_of_probability_zero_are_never_drawn():
    logits = torch.full((300, 256), -1e9)
    logits[:, 130] = 0.0
    temperatures, numbers = torch.tensor([1.0, 0.5, 0.0]).repeat(100), torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64).repeat(100)
    assert sample(logits, temperatures, numbers)[0].tolist() == [130] * 300


def test_tokens_and_log_probs_travel_exactly_in_one_tensor():
    logprobs = torch.tensor([-0.1, -12.34567])
    assert unpack(pack(torch.tensor([0, 151_935]), logprobs)) == ([0, 151_935], logprobs.tolist())
