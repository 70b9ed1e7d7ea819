import math

import pytest
import torch
from torch import nan, tensor
from torch.testing import assert_close

from agentrl.algorithm.gap import GAP_EXTREMES, GAP_SUMS, gap_metrics, gap_sums

# Ratios 2 and 1/2 in one trajectory, 4 in the other; the last place holds nothing.
LEARNER = tensor([[0.5, 0.25], [1.0, nan]]).log()
BEHAVIOUR = tensor([[0.25, 0.5], [0.25, nan]]).log()
MASK = tensor([[1, 1], [1, 0]])


def test_the_gap_by_hand():
    metrics = gap_metrics(*gap_sums(LEARNER, BEHAVIOUR, MASK))
    log2 = math.log(2)
    assert metrics["kl_k1"] == pytest.approx((-log2 + log2 - 2 * log2) / 3)
    assert metrics["kl_k3"] == pytest.approx(((2 - 1 - log2) + (0.5 - 1 + log2) + (4 - 1 - 2 * log2)) / 3)
    assert [metrics[f"logprob_gap_{of}"] for of in ("mean", "max")] == pytest.approx([4 * log2 / 3, 2 * log2])  # ln 2, ln 2 and ln 4 apart
    assert metrics["chi2_token"] == pytest.approx((4 + 0.25 + 16) / 3 - 1)
    assert metrics["chi2_sequence"] == pytest.approx((1 + 16) / 2 - 1)  # ratios of the trajectories 1 and 4
    assert metrics["ess"] == pytest.approx(6.5**2 / (3 * 20.25))
    assert [metrics[name] for name in ("ratio_mean", "ratio_min", "ratio_max")] == pytest.approx([6.5 / 3, 0.5, 4.0])


def test_perplexities_by_hand():
    # mean log-prob of the first trajectory: -1.5 log 2 for both, perplexity 2^1.5; of the second 0 and -2 log 2: 1 and 4
    metrics = gap_metrics(*gap_sums(LEARNER, BEHAVIOUR, MASK))
    log2 = math.log(2)
    assert metrics["learner_ppl"] == pytest.approx((2**1.5 + 1) / 2)
    assert metrics["behaviour_ppl"] == pytest.approx((2**1.5 + 4) / 2)
    assert metrics["learner_log_ppl"] == pytest.approx(0.75 * log2)
    assert metrics["behaviour_log_ppl"] == pytest.approx(1.75 * log2)
    assert [metrics[f"log_ppl_gap{end}"] for end in ("", "_abs", "_max", "_min")] == pytest.approx([-log2, log2, 0.0, -2 * log2])
    assert metrics["ppl_ratio"] == pytest.approx((1 + 0.25) / 2)


def test_micro_batches_add_up_and_rows_without_tokens_count_for_nothing():
    whole, extremes = gap_sums(LEARNER, BEHAVIOUR, MASK)
    parts = [gap_sums(LEARNER[row : row + 1], BEHAVIOUR[row : row + 1], MASK[row : row + 1]) for row in (0, 1)]
    empty, nothing = gap_sums(LEARNER, BEHAVIOUR, torch.zeros(2, 2))
    assert_close(parts[0][0] + parts[1][0] + empty, whole)
    assert_close(torch.maximum(torch.maximum(parts[0][1], parts[1][1]), nothing), extremes)
    assert (len(whole), len(extremes)) == (len(GAP_SUMS), len(GAP_EXTREMES))


def test_no_token_has_no_gap():
    assert gap_metrics(*gap_sums(LEARNER, BEHAVIOUR, torch.zeros(2, 2))) == {}


def test_a_broken_token_gives_a_finite_gap():
    metrics = gap_metrics(*gap_sums(tensor([[-1e4]]), tensor([[0.0]]), tensor([[1]])))
    assert all(math.isfinite(value) for value in metrics.values())
