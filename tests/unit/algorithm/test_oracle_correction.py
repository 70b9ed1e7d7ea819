"""Off-policy correction, KL, value loss against the outputs of verl 0.9.1's own code, float64."""

import pytest
from torch.testing import assert_close

from agentrl.algorithm.controllers import adapted_coefficient
from agentrl.algorithm.gap import gap_metrics, gap_sums
from agentrl.algorithm.importance import batch_normaliser, effective_sample_share, importance_weights, weight_sums
from agentrl.algorithm.kl import kl_estimate
from agentrl.algorithm.rejection import STATISTICS, kept
from agentrl.algorithm.value_loss import value_losses

TOLERANCE = {"atol": 1e-6, "rtol": 1e-6}


@pytest.mark.parametrize("normalise", [0, 1])
@pytest.mark.parametrize(("threshold", "truncate", "bounds"), [("2.0", 2.0, None), ("0.5_2.0", None, (0.5, 2.0))])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_importance_weights(oracle, level, threshold, truncate, bounds, normalise):
    name, mask = f"is_{level}_{threshold}_bn{normalise}", oracle["mask"]
    weights, _ = importance_weights(oracle["old_logp"], oracle["rollout_logp"], mask, level=level, truncate=truncate, bounds=bounds)
    ess = effective_sample_share(weights.sum(), weights.square().sum(), mask.sum())
    if normalise:
        weights = weights / batch_normaliser(*weight_sums(weights, mask, level=level))
    assert_close(weights, oracle[name], **TOLERANCE)
    assert_close(ess, oracle[name + "_ess"], **TOLERANCE)


@pytest.mark.parametrize("statistic", STATISTICS)
def test_rejection(oracle, statistic):
    # verl was given the bounds .7 and 1.3 for k1 and applied them to behaviour / compared: of compared / behaviour they are 1/1.3 and 1/.7
    low, high = (1 / 1.3, 1 / 0.7) if statistic.endswith("k1") else (None, 0.2)
    keep = kept(oracle["old_logp"], oracle["rollout_logp"], oracle["mask"], statistic=statistic, low=low, high=high)
    assert_close(keep.double(), oracle[f"rs_{statistic}"])


def test_tokens_that_verl_rejects_by_the_reciprocal_of_their_ratio(oracle):
    ratio = (oracle["old_logp"] - oracle["rollout_logp"]).exp()
    ours = kept(oracle["old_logp"], oracle["rollout_logp"], oracle["mask"], statistic="token_k1", low=0.7, high=1.3)
    differs = ours != oracle["rs_token_k1"].bool()
    assert differs.any()
    assert ((ratio[differs & ours] >= 0.7) & (ratio[differs & ours] < 1 / 1.3)).all()
    assert ((ratio[differs & ~ours] > 1.3) & (ratio[differs & ~ours] <= 1 / 0.7)).all()


@pytest.mark.parametrize(("ours", "theirs"), [("k1", "k1"), ("abs", "abs"), ("k2", "k2"), ("k3", "k3"), ("k3_straight_through", "k3+")])
def test_kl_estimates_and_their_gradients(oracle, ours, theirs):
    logp = oracle["logp"].clone().requires_grad_()
    estimate = kl_estimate(ours, logp, oracle["ref_logp"])
    estimate.sum().backward()
    assert_close(estimate.detach(), oracle[f"kl_{theirs}"], **TOLERANCE)
    assert_close(logp.grad, oracle[f"kl_{theirs}_grad"], **TOLERANCE)


def test_the_gap_of_learner_and_behaviour(oracle):
    ours = gap_metrics(*gap_sums(oracle["old_logp"], oracle["rollout_logp"], oracle["mask"]))
    names = {
        "kl": "kl_k1",
        "k3_kl": "kl_k3",
        "training_ppl": "learner_ppl",
        "training_log_ppl": "learner_log_ppl",
        "rollout_ppl": "behaviour_ppl",
        "rollout_log_ppl": "behaviour_log_ppl",
        "log_ppl_diff": "log_ppl_gap",
        "log_ppl_abs_diff": "log_ppl_gap_abs",
        "log_ppl_diff_max": "log_ppl_gap_max",
        "log_ppl_diff_min": "log_ppl_gap_min",
        "ppl_ratio": "ppl_ratio",
        "chi2_token": "chi2_token",
        "chi2_seq": "chi2_sequence",
    }
    assert {f"offp_{name}" for name in names} == {name for name in oracle if name.startswith("offp_")}
    for theirs, name in names.items():
        assert ours[name] == pytest.approx(oracle[f"offp_{theirs}"].item(), abs=1e-6), name


def test_the_adaptive_coefficient(oracle):
    assert adapted_coefficient(0.2, kl=9, target=6.0, horizon=10000, samples=256) == pytest.approx(oracle["adaptive_kl"].item(), abs=1e-12)


def test_the_clipped_value_loss(oracle):
    mask = oracle["mask"]
    losses, clipped = value_losses(oracle["vpreds"], oracle["values"], oracle["vret"], clip=0.5)
    assert_close((losses * mask).sum() / mask.sum(), oracle["value_loss"], **TOLERANCE)
    assert_close((clipped * mask).sum() / mask.sum(), oracle["value_clipfrac"], **TOLERANCE)
