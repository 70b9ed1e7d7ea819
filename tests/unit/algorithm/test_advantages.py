"""Every estimator by name: what observations, rewards on them, lonely trajectories and wrong options do."""

from dataclasses import replace

import pytest
import torch
import torch.distributed.tensor  # assert_close imports it when it is first called, which takes a test longer than it has
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nan, tensor
from torch.testing import assert_close

from agentrl.algorithm.advantages import ESTIMATORS, AdvantageInputs, Advantages, Estimator, estimate, find_estimator
from agentrl.algorithm.gae import gae, reward_to_go, vtrace
from agentrl.errors import ConfigError

OPTIONS = {
    "gdpo": {"parts": ["answer", "format"], "weights": [1.0, 0.5]},
    "vtrace": {"rho_bar": 2.0},
    "tir_optimal_token_baseline": {"truncate": 2.0},
}
ROWS, TOKENS = 5, 4

every_estimator = pytest.mark.parametrize("name", ESTIMATORS)


def estimated(name, inputs, *, gamma=0.9, lam=0.8, whiten=None):
    return estimate(name, inputs, gamma=gamma, lam=lam, whiten=whiten, options=OPTIONS.get(name, {}))


@st.composite
def trajectories(draw):
    """Generated tokens and nothing else, of any lengths, in groups of any size. Rewards are quarters: their sums are exact."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    lengths = tensor(draw(st.lists(st.integers(0, TOKENS), min_size=ROWS, max_size=ROWS)))
    mask = torch.arange(TOKENS) < lengths[:, None]

    def some(*shape):
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    return AdvantageInputs(
        rewards_BT=torch.randint(-2, 3, (ROWS, TOKENS), generator=generator).double() / 4 * mask,
        mask_BT=mask,
        groups_B=tensor(draw(st.lists(st.integers(0, 2), min_size=ROWS, max_size=ROWS))),
        values_BT=some(ROWS, TOKENS),
        baselines_B=some(ROWS),
        parts_BK=some(ROWS, 2),
        logp_BT=-some(ROWS, TOKENS),
        behaviour_BT=-some(ROWS, TOKENS),
        sum_pi_squared_BT=some(ROWS, TOKENS),
    )


gaps = st.lists(st.lists(st.integers(0, 3), min_size=TOKENS + 1, max_size=TOKENS + 1), min_size=ROWS, max_size=ROWS).map(tensor)


def with_observations(inputs, gaps, *, late_rewards):
    """The same trajectories with `gaps` tokens of something else before each token and at the end; and where the old tokens are.

    With `late_rewards` a reward stands on the last token of the span after its own.
    """
    place = torch.arange(TOKENS) + gaps[:, :-1].cumsum(1)
    width = TOKENS + int(gaps.sum(1).max())

    def spread(values, nothing):
        return torch.full((ROWS, width), nothing, dtype=values.dtype).scatter(1, place, values)

    landing = place + gaps[:, 1:] if late_rewards else place
    rest = {name: spread(getattr(inputs, name), nan) for name in ("values_BT", "logp_BT", "behaviour_BT", "sum_pi_squared_BT")}
    rewards = torch.zeros(ROWS, width, dtype=torch.float64).scatter(1, landing, inputs.rewards_BT)
    return replace(inputs, rewards_BT=rewards, mask_BT=spread(inputs.mask_BT, False), **rest), place


@every_estimator
@settings(max_examples=12)
@given(inputs=trajectories(), gaps=gaps, late_rewards=st.booleans())
def test_observations_anywhere_change_no_advantage_and_no_reward_on_them_is_lost(name, inputs, gaps, late_rewards):
    plain = estimated(name, inputs)
    wide, place = with_observations(inputs, gaps, late_rewards=late_rewards)
    found = estimated(name, wide)
    assert_close(found.advantages_BT.gather(1, place), plain.advantages_BT, atol=1e-9, rtol=1e-9)
    assert (found.advantages_BT[~wide.mask_BT] == 0).all()
    if plain.returns_BT is not None:
        assert_close(found.returns_BT.gather(1, place), plain.returns_BT, atol=1e-9, rtol=1e-9)
        assert (found.returns_BT[~wide.mask_BT] == 0).all()


@settings(max_examples=12)
@given(inputs=trajectories(), gaps=gaps, late_rewards=st.booleans())
def test_undiscounted_the_first_generated_token_sees_all_that_was_earned(inputs, gaps, late_rewards):
    wide, place = with_observations(inputs, gaps, late_rewards=late_rewards)
    begun = wide.mask_BT.any(1)
    first, earned = place[begun, 0], wide.scores_B[begun]
    rewards, values, mask = wide.rewards_BT, wide.values_BT, wide.mask_BT
    seen = [
        reward_to_go(rewards, mask),
        gae(rewards, values, mask, gamma=1.0, lam=1.0).returns_BT,
        vtrace(rewards, values, mask, wide.logp_BT, wide.logp_BT, gamma=1.0, lam=1.0).returns_BT,
    ]
    for found in seen:
        assert_close(found[begun, first], earned, atol=1e-9, rtol=1e-9)


@every_estimator
def test_lonely_empty_and_equal_trajectories_have_finite_advantages(name):
    # groups 0: nothing generated; 1: one trajectory; 2: two equal ones; 3: one with tokens beside one without
    mask = tensor([[False, False], [True, True], [True, False], [True, False], [True, True], [False, False]])
    flat = torch.zeros(6, 2, dtype=torch.float64)
    inputs = AdvantageInputs(
        rewards_BT=flat + 1.0,
        mask_BT=mask,
        groups_B=tensor([0, 1, 2, 2, 3, 3]),
        values_BT=flat,
        baselines_B=flat[:, 0],
        parts_BK=flat + 1.0,
        logp_BT=flat,
        behaviour_BT=flat,
        sum_pi_squared_BT=flat + 1.0,
    )
    for given_inputs in (inputs, replace(inputs, mask_BT=mask & False)):
        found = estimated(name, given_inputs)
        assert found.advantages_BT.isfinite().all()
        assert (found.advantages_BT[~given_inputs.mask_BT] == 0).all()


# Rewards 1, 2 and 3, each a group of one, and the token after them that nobody generated.
THREE = AdvantageInputs(
    rewards_BT=tensor([[1.0, 0.0], [2.0, 0.0], [3.0, 0.0]]),
    mask_BT=tensor([[True, False]] * 3),
    groups_B=tensor([0, 1, 2]),
    values_BT=torch.zeros(3, 2),
)
THREE_SCORED = replace(THREE, logp_BT=torch.zeros(3, 2), behaviour_BT=torch.zeros(3, 2), sum_pi_squared_BT=torch.ones(3, 2))


@pytest.mark.parametrize(
    ("name", "whiten", "expected"),
    [
        ("reinforce_plus_plus", None, [-1.0, 0.0, 1.0]),  # mean 2, variance 1
        ("reinforce_plus_plus", False, [1.0, 2.0, 3.0]),
        ("rloo", None, [1.0, 2.0, 3.0]),
        ("rloo", True, [-1.0, 0.0, 1.0]),
    ],
)
def test_advantages_are_whitened_as_the_source_does_or_as_told(name, whiten, expected):
    assert_close(estimated(name, THREE, whiten=whiten).advantages_BT[:, 0], tensor(expected))


def test_a_critics_targets_are_never_whitened():
    found = estimated("gae", THREE)
    assert_close(found.advantages_BT[:, 0], tensor([-1.0, 0.0, 1.0]))
    assert_close(found.returns_BT[:, 0], tensor([1.0, 2.0, 3.0]))


def one_each(inputs, *, factor=1.0):
    return factor * inputs.scores_B


def one_per_token(inputs, *, gamma):
    return torch.full_like(inputs.rewards_BT, gamma)


def with_returns(inputs):
    return Advantages(advantages_BT=inputs.rewards_BT, returns_BT=inputs.rewards_BT + 1)


def of_another_shape(inputs):
    return inputs.rewards_BT[:1]


FROM_VALUES = Estimator(function=one_each, needs=frozenset({"values"}), whitens=True)


def test_a_function_from_outside_may_return_a_number_a_trajectory_a_number_a_token_or_both_kinds():
    assert_close(
        estimate(f"{__name__}:one_each", THREE_SCORED, gamma=1.0, lam=1.0, whiten=None, options={"factor": 2.0}).advantages_BT[:, 0],
        tensor([2.0, 4.0, 6.0]),
    )
    assert estimated(f"{__name__}:one_per_token", THREE_SCORED).advantages_BT.tolist() == tensor([[0.9, 0.0]] * 3).tolist()
    assert estimated(f"{__name__}:with_returns", THREE_SCORED).returns_BT.tolist() == [[2.0, 0.0], [3.0, 0.0], [4.0, 0.0]]


def test_an_estimator_from_outside_says_what_it_needs():
    assert find_estimator(f"{__name__}:FROM_VALUES") is FROM_VALUES
    assert find_estimator(f"{__name__}:one_each").needs == {"logp", "sum_pi_squared"}
    assert_close(estimated(f"{__name__}:FROM_VALUES", THREE).advantages_BT[:, 0], tensor([-1.0, 0.0, 1.0]))


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("gropo", {}, "unknown estimator 'gropo': expected one of gae, vtrace, grpo"),
        ("vtrace", {}, "estimator vtrace needs logp_BT, behaviour_BT"),
        ("remax", {}, "estimator remax needs baselines_B"),
        ("grpo", {"singleton": "zero"}, "estimator grpo: got an unexpected keyword argument 'singleton'"),
        ("rloo", {"singleton": "none"}, "estimator rloo: singleton must be reward or zero"),
        ("test_advantages:nothing_there", {}, "nothing_there"),
    ],
)
def test_what_cannot_be_estimated_is_told(name, options, told):
    with pytest.raises(ConfigError, match=told):
        estimate(name, THREE, gamma=1.0, lam=1.0, whiten=None, options=options)


def test_advantages_of_another_shape_are_refused():
    with pytest.raises(ConfigError, match=r"of shape \[3, 2\] or \[3\], got \[1, 2\]"):
        estimated(f"{__name__}:of_another_shape", THREE_SCORED)
