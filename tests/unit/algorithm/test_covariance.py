import torch
from torch import tensor

from agentrl.algorithm.covariance import clip_cov_selection, covariance_terms, kl_cov_selection

# log-probs -1, -2, -3, -6 (mean -3), advantages 2, 0, -1, -1 (mean 0), and an observation that counts for nothing
LOGP = tensor([[-1.0, 5, -2], [-3, -6, 5]])
ADVANTAGES = tensor([[2.0, 9, 0], [-1, -1, 9]])
MASK = tensor([[1, 0, 1], [1, 1, 0]])


def test_covariance_terms_by_hand():
    # (2)(2), (1)(0), (0)(-1), (-3)(-1)
    assert covariance_terms(LOGP, ADVANTAGES, MASK).tolist() == [[4, 0, 0], [0, 3, 0]]


def test_kl_cov_takes_the_largest_terms():
    one = kl_cov_selection(LOGP, ADVANTAGES, MASK, seed=0, share=0.25)
    two = kl_cov_selection(LOGP, ADVANTAGES, MASK, seed=0, share=0.5)
    assert one.tolist() == [[True, False, False], [False, False, False]]
    assert two.tolist() == [[True, False, False], [False, True, False]]


def test_clip_cov_takes_some_of_those_between_its_bounds():
    both = clip_cov_selection(LOGP, ADVANTAGES, MASK, seed=0, share=1.0)
    lower = clip_cov_selection(LOGP, ADVANTAGES, MASK, seed=0, share=1.0, covariance_high=3.5)
    none = clip_cov_selection(LOGP, ADVANTAGES, MASK, seed=0, share=1.0, covariance_low=4.5)
    assert both.tolist() == [[True, False, False], [False, True, False]]
    assert lower.tolist() == [[False, False, False], [False, True, False]]
    assert not none.any()


def test_the_choice_is_random_by_its_seed_alone():
    generator = torch.Generator().manual_seed(1)
    logp, advantages = (4 * torch.randn(20, 30, generator=generator) for _ in range(2))
    mask = torch.rand(20, 30, generator=generator) < 0.7
    first, again, other = (clip_cov_selection(logp, advantages, mask, seed=seed, share=0.01) for seed in (5, 5, 6))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.sum() == other.sum() == int(0.01 * mask.sum())
    assert not (first & ~mask).any()


def test_equal_terms_are_chosen_between_by_the_seed():
    zeros = torch.zeros(1, 50)
    chosen = {int(kl_cov_selection(zeros, zeros, zeros + 1, seed=seed).nonzero()[0, 1]) for seed in range(8)}
    assert len(chosen) > 1


def test_nothing_generated_is_nothing_chosen():
    for selection in (clip_cov_selection, kl_cov_selection):
        assert not selection(LOGP, ADVANTAGES, torch.zeros_like(MASK), seed=0).any()


def test_what_stands_outside_the_mask_changes_nothing():
    spoilt = LOGP.masked_fill(MASK == 0, float("nan"))
    assert kl_cov_selection(spoilt, spoilt.masked_fill(MASK == 1, 0) + ADVANTAGES, MASK, seed=0, share=0.25)[0, 0]
