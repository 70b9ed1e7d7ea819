"""The advantage estimators against the outputs of verl 0.9.1's own code, float64.

verl drops rewards outside its mask where it sums token by token (gae, reinforce_plus_plus, remax); here they belong to the token before. The
oracle's rewards stand everywhere, so these three are compared on rewards that are 0 outside the mask, where both mean the same.
"""

from dataclasses import replace

import pytest
from torch.testing import assert_close

from agentrl.algorithm.advantages import AdvantageInputs, estimate
from agentrl.algorithm.gae import reward_to_go

CLOSE = {"atol": 1e-6, "rtol": 1e-6}
GAMMA = 0.99  # of what is not named otherwise


def inputs(oracle):
    values = {
        "values_BT": oracle["values"],
        "baselines_B": oracle["baselines"],
        "logp_BT": oracle["old_logp"],
        "behaviour_BT": oracle["rollout_logp"],
    }
    return AdvantageInputs(rewards_BT=oracle["rewards"], mask_BT=oracle["mask"].bool(), groups_B=oracle["uid"], **values)


def only_on_generated_tokens(given):
    return replace(given, rewards_BT=given.rewards_BT * given.mask_BT)


def estimated(name, given, *, gamma=GAMMA, lam=1.0, **options):
    return estimate(name, given, gamma=gamma, lam=lam, whiten=None, options=options)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95)])
def test_gae(oracle, gamma, lam):
    given = only_on_generated_tokens(inputs(oracle))
    ours, mask = estimated("gae", given, gamma=gamma, lam=lam), given.mask_BT
    # verl's arrays hold carried values outside the mask
    assert_close(ours.advantages_BT[mask], oracle[f"gae_{gamma}_{lam}_adv"][mask], **CLOSE)
    assert_close(ours.returns_BT[mask], oracle[f"gae_{gamma}_{lam}_ret"][mask], **CLOSE)


@pytest.mark.parametrize(
    ("peer", "name", "options"),
    [
        ("grpo", "grpo", {}),
        ("grpo_vectorized", "grpo", {}),
        ("drgrpo", "dr_grpo", {}),
        ("rloo", "rloo", {"singleton": "reward"}),
        ("rloo_vectorized", "rloo", {"singleton": "zero"}),
        ("opo", "opo", {}),
        ("gpg", "gpg", {}),
        ("grpo_passk", "grpo_passk", {}),
        ("reinforce_plus_plus_baseline", "reinforce_plus_plus_baseline", {}),
    ],
)
def test_advantages_of_whole_trajectories(oracle, peer, name, options):
    assert_close(estimated(name, inputs(oracle), **options).advantages_BT, oracle["adv_" + peer], **CLOSE)


def test_reinforce_plus_plus(oracle):
    given = only_on_generated_tokens(inputs(oracle))
    assert_close(estimated("reinforce_plus_plus", given).advantages_BT, oracle["adv_rpp"], **CLOSE)
    assert_close(reward_to_go(given.rewards_BT, given.mask_BT, gamma=GAMMA), oracle["ret_rpp"], **CLOSE)


def test_remax(oracle):
    given = only_on_generated_tokens(inputs(oracle))
    mask = given.mask_BT
    assert_close(estimated("remax", given).advantages_BT[mask], oracle["adv_remax"][mask], **CLOSE)


def test_no_advantage_of_the_oracle_is_left_out(oracle):
    compared = {
        "grpo",
        "grpo_vectorized",
        "drgrpo",
        "rloo",
        "rloo_vectorized",
        "opo",
        "gpg",
        "grpo_passk",
        "reinforce_plus_plus_baseline",
        "rpp",
        "remax",
    }
    inputs_of_losses = {"adv_in"}
    assert {name for name in oracle if name.startswith("adv_")} == {"adv_" + name for name in compared} | inputs_of_losses
    assert {name for name in oracle if name.startswith("gae_")} == {
        f"gae_{case}_{kind}" for case in ("1.0_1.0", "0.99_0.95") for kind in ("adv", "ret")
    }
    assert {name for name in oracle if name.startswith("ret_")} == {"ret_rpp"}
