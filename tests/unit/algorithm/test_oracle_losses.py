"""The policy losses and aggregations against the outputs of verl 0.9.1's own code, float64: values, gradients and metrics."""

import pytest
import torch
from torch.testing import assert_close

from agentrl.algorithm.aggregation import AGGREGATIONS, Denominators, aggregate
from agentrl.algorithm.losses import LossInputs, find_loss

# verl's name -> ours and its arguments.
LOSSES = {
    "vanilla": ("ppo", {"dual_clip": 3.0}),
    "clip_higher": ("ppo", {"clip_high": 0.28, "dual_clip": 3.0}),
    "gspo": ("gspo", {"clip_low": 3e-3, "clip_high": 4e-3}),
    "cispo": ("cispo", {"clip_low": 10.0, "clip_high": 0.2}),
    "geo_mean": ("gmpo", {}),
    "gpg": ("gpg", {}),
    "sapo": ("sapo", {}),
    # verl's truncation is 20, and is 3 where the dual clip's setting, which has the same name, is left at its default
    "dppo_tv": ("dppo_tv", {"clip_low": 0.2, "clip_high": 0.2, "truncate": 3.0}),
    "dppo_kl": ("dppo_kl", {"clip_low": 0.2, "clip_high": 0.2, "truncate": 3.0}),
}
FIXED = ("geo_mean", "sapo")  # verl ignores loss_agg_mode for these; for gspo, in 0.9.1, it does not

cases = pytest.mark.parametrize(("peer", "how"), [(peer, how) for peer in LOSSES for how in AGGREGATIONS])


def computed(oracle, peer):
    name, arguments = LOSSES[peer]
    inputs = LossInputs(
        logp_BT=oracle["logp"].clone().requires_grad_(),
        old_BT=oracle["old_logp"],
        advantages_BT=oracle["adv_in"],
        mask_BT=oracle["mask"],
        weights_BT=torch.ones_like(oracle["mask"]),
    )
    return inputs, find_loss(name).bind(arguments).losses(inputs)


@cases
def test_a_loss_and_its_gradient(oracle, peer, how):
    inputs, losses = computed(oracle, peer)
    # verl's horizon, where it is given none, is the width of the padded batch
    denominators = Denominators.of(inputs.mask_BT, horizon=inputs.mask_BT.shape[1])
    ours = aggregate(losses.values_BT, inputs.mask_BT, how="seq_mean_token_mean" if peer in FIXED else how, denominators=denominators)
    ours.backward()
    theirs = f"pg_{peer}_{how.replace('_', '-')}"
    assert_close(ours.detach(), oracle[theirs], rtol=0, atol=1e-6)
    assert_close(inputs.logp_BT.grad, oracle[theirs + "_grad"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("peer", [peer for peer in LOSSES if peer != "gpg"])
def test_what_the_bounds_of_a_loss_did(oracle, peer):
    inputs, losses = computed(oracle, peer)
    mask, log_ratio, advantages = inputs.mask_BT > 0, inputs.log_ratio_BT.detach(), inputs.advantages_BT

    def share(tokens_BT):
        return ((tokens_BT & mask).sum() / mask.sum()).item()

    low, high, capped = share(losses.clipped_low_BT), share(losses.clipped_high_BT), share(losses.capped_BT)
    if peer == "geo_mean":
        # verl counts a log-ratio outside of 0.4 on either side, by the advantage's sign; ours where the bound took the gradient
        ours = (high + share((log_ratio < -0.4) & (advantages > 0)), low + share((log_ratio > 0.4) & (advantages < 0)))
    else:
        ours = (low + high, capped)
    for how in AGGREGATIONS:
        theirs = f"pg_{peer}_{how.replace('_', '-')}"
        assert ours[0] == pytest.approx(oracle[theirs + "_pg_clipfrac"].item(), abs=1e-6)
        assert ours[1] == pytest.approx(oracle[theirs + "_pg_clipfrac_lower"].item(), abs=1e-6)
        assert -log_ratio[mask].mean().item() == pytest.approx(oracle[theirs + "_ppo_kl"].item(), abs=1e-6)
