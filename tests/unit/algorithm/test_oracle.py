"""The formulas against the outputs of verl 0.9.1's own code, float64."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from agentrl.algorithm.importance import effective_sample_share, truncated_weights
from agentrl.algorithm.kl import k1, k3
from agentrl.algorithm.losses import clipped_policy_loss

DATA = Path(os.environ.get("AGENTRL_TEST_DATA", Path(__file__).parents[3].parent / "shared" / "data"))
ORACLE = DATA / "oracle" / "verl_0.9.1_seed0.npz"
DUAL_CLIP = 3.0  # verl's vanilla loss bounds what a token with a negative advantage can add; this one does not


@pytest.fixture(scope="module")
def oracle():
    if not ORACLE.is_file():
        pytest.skip(f"no oracle at {ORACLE}: set AGENTRL_TEST_DATA")
    with np.load(ORACLE) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files}


@pytest.mark.parametrize(("name", "high"), [("pg_vanilla_token-mean", 0.2), ("pg_clip_higher_token-mean", 0.28)])
def test_clipped_loss_and_its_gradient(oracle, name, high):
    logp, mask = oracle["logp"].clone().requires_grad_(), oracle["mask"]
    arguments = (logp, oracle["old_logp"], oracle["adv_in"], mask)
    loss, stats = clipped_policy_loss(*arguments, clip_low=0.2, clip_high=high, denominator=mask.sum())
    loss.backward()
    ratio = (oracle["logp"] - oracle["old_logp"]).exp()
    dual = (oracle["adv_in"] < 0) & (ratio > DUAL_CLIP) & (mask == 1)
    assert dual.sum() / mask.sum() == pytest.approx(oracle[name + "_pg_clipfrac_lower"].item())
    assert_close(logp.grad[~dual], oracle[name + "_grad"][~dual])
    spared = ((ratio - DUAL_CLIP) * -oracle["adv_in"])[dual].sum() / mask.sum()
    assert_close(loss.detach() - spared, oracle[name])
    clipped = (stats.clipped_low + stats.clipped_high) / stats.tokens
    assert clipped.item() == pytest.approx(oracle[name + "_pg_clipfrac"].item())


def test_truncated_importance_weights_and_effective_sample_share(oracle):
    mask = oracle["mask"]
    weights, _ = truncated_weights(oracle["old_logp"], oracle["rollout_logp"], truncate=2.0)
    assert_close(weights * mask, oracle["is_token_2.0_bn0"])
    sums = ((weights * mask).sum(), (weights.square() * mask).sum(), mask.sum())
    assert_close(effective_sample_share(*sums), oracle["is_token_2.0_bn0_ess"])


def test_divergence_of_policy_and_reference(oracle):
    assert_close(k1(oracle["logp"], oracle["ref_logp"]), oracle["kl_k1"])
    assert_close(k3(oracle["logp"], oracle["ref_logp"]), oracle["kl_k3"])


def test_divergence_of_behaviour_and_learner(oracle):
    mask = oracle["mask"]
    behaviour, learner = oracle["rollout_logp"], oracle["old_logp"]
    assert_close((k1(behaviour, learner) * mask).sum() / mask.sum(), oracle["offp_kl"])
    assert_close((k3(behaviour, learner) * mask).sum() / mask.sum(), oracle["offp_k3_kl"])
