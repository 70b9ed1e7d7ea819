"""What holds for every policy loss."""

import pytest
import torch
from torch.testing import assert_close

from agentrl.algorithm.aggregation import AGGREGATIONS, Denominators, aggregate
from agentrl.algorithm.losses import POLICY_LOSSES, LossInputs, PolicyLoss, TokenLosses, find_loss
from agentrl.config.methods import LOSSES, MEANS_OF_TRAJECTORIES
from agentrl.errors import ConfigError

every_loss = pytest.mark.parametrize("name", POLICY_LOSSES)


def random_inputs(rows=7, tokens=9):
    generator = torch.Generator().manual_seed(3)

    def noise():
        return torch.randn(rows, tokens, generator=generator, dtype=torch.float64)

    old_BT = -noise().abs() - 0.1
    logp_BT = (old_BT + 0.4 * noise()).clamp(max=-0.01)
    mask_BT = (torch.rand(rows, tokens, generator=generator) < 0.6).double()
    mask_BT[:, 0], mask_BT[-1] = 1, 0  # the last row is empty
    return {
        "logp_BT": logp_BT,
        "old_BT": old_BT,
        "advantages_BT": noise(),
        "mask_BT": mask_BT,
        "weights_BT": noise().abs(),
        "selected_BT": noise() > 1,
    }


def losses_of(name, given):
    """Token losses with the default arguments, and the leaf their gradient goes to."""
    logp_BT = given["logp_BT"].clone().requires_grad_()
    return POLICY_LOSSES[name].bind({}).losses(LossInputs(**(given | {"logp_BT": logp_BT}))), logp_BT


def aggregated(name, given, how, denominators):
    losses, logp_BT = losses_of(name, given)
    value = aggregate(losses.values_BT, given["mask_BT"], how=how, denominators=denominators)
    value.backward()
    return value.detach(), logp_BT.grad


@every_loss
@pytest.mark.parametrize("how", AGGREGATIONS)
def test_parts_of_an_update_add_up_to_the_whole(name, how):
    given = random_inputs()
    denominators = Denominators.of(given["mask_BT"], horizon=20.0)
    whole, gradient = aggregated(name, given, how, denominators)
    # two ranks, rows dealt alternately; the first in two micro-batches, the second in one for each row
    order = [0, 2, 4, 6, 1, 3, 5]
    parts = [order[:2], order[2:4], *([row] for row in order[4:])]
    values, gradients = zip(*(aggregated(name, {k: v[rows] for k, v in given.items()}, how, denominators.rows(rows)) for rows in parts), strict=True)
    assert_close(sum(values), whole, rtol=0, atol=1e-12)
    assert_close(torch.cat(gradients), gradient[order], rtol=0, atol=1e-12)


@every_loss
@pytest.mark.parametrize("rubbish", [float("nan"), float("inf"), float("-inf"), 1e300])
def test_what_stands_outside_the_mask_reaches_neither_value_nor_gradient(name, rubbish):
    given = random_inputs()
    outside = given["mask_BT"] == 0
    spoilt = {key: values.masked_fill(outside, True if values.dtype == torch.bool else rubbish) for key, values in given.items()}
    denominators = Denominators.of(given["mask_BT"])
    expected, gradient = aggregated(name, given, "token_mean", denominators)
    value, spoilt_gradient = aggregated(name, spoilt | {"mask_BT": given["mask_BT"]}, "token_mean", denominators)
    assert value == expected
    assert torch.equal(spoilt_gradient, gradient)
    assert (gradient[outside] == 0).all()
    losses, _ = losses_of(name, spoilt | {"mask_BT": given["mask_BT"]})
    assert not (losses.clipped_low_BT | losses.clipped_high_BT | losses.capped_BT)[outside].any()


@every_loss
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_log_ratios_stay_finite(name, dtype):
    given = {
        "logp_BT": torch.tensor([[-1000, -1000, 0, 0, -1000, 0]], dtype=dtype).T,
        "old_BT": torch.tensor([[0, 0, -1000, -1000, -1000, 0]], dtype=dtype).T,
        "advantages_BT": torch.tensor([[1, -1, 1, -1, 1, -1]], dtype=dtype).T,
        "mask_BT": torch.ones(6, 1, dtype=dtype),
        "weights_BT": torch.tensor([[1, 0, 1, 2, 1, 0]], dtype=dtype).T,
        "selected_BT": torch.ones(6, 1, dtype=torch.bool),
    }
    for shape in ((6, 1), (1, 6)):
        losses, logp_BT = losses_of(name, {key: values.reshape(shape) for key, values in given.items()})
        losses.values_BT.sum().backward()
        assert losses.values_BT.isfinite().all()
        assert logp_BT.grad.isfinite().all()


@every_loss
def test_on_policy_the_gradient_of_every_loss_is_that_of_reinforce(name):
    given = random_inputs() | {"selected_BT": torch.zeros(7, 9, dtype=torch.bool)}
    given |= {"old_BT": given["logp_BT"].clone(), "weights_BT": torch.ones(7, 9, dtype=torch.float64)}
    if POLICY_LOSSES[name].aggregation:  # an advantage per trajectory, as in their papers
        given["advantages_BT"] = given["advantages_BT"][:, :1].expand(7, 9).clone()
    how, denominators = "seq_mean_token_mean", Denominators.of(given["mask_BT"])
    _, expected = aggregated("reinforce", given, how, denominators)
    _, gradient = aggregated(name, given, how, denominators)
    assert_close(gradient, expected)


@every_loss
def test_nothing_generated_is_no_loss(name):
    given = random_inputs() | {"mask_BT": torch.zeros(7, 9, dtype=torch.float64)}
    for how in AGGREGATIONS:
        value, gradient = aggregated(name, given, how, Denominators.of(given["mask_BT"], horizon=1.0))
        assert value == 0
        assert (gradient == 0).all()


def test_the_recipe_knows_the_losses_and_their_arguments():
    def arguments_of(loss):
        functions = [function for function in (loss.function, loss.selection) if function]
        return {name for function in functions for name in function.__kwdefaults__ or {}}

    told = {name: (kind == "ratio", set(arguments)) for name, (kind, *arguments) in LOSSES.items()}
    assert told == {name: (loss.ratio, arguments_of(loss)) for name, loss in POLICY_LOSSES.items()}
    assert dict.fromkeys(MEANS_OF_TRAJECTORIES, "seq_mean_token_mean") == {
        n: loss.aggregation for n, loss in POLICY_LOSSES.items() if loss.aggregation
    }


@pytest.mark.parametrize(
    ("name", "arguments", "complaint"),
    [
        ("ppo", {"dual_clip": 0.9}, "dual_clip is a bound of the ratio above 1, got 0.9"),
        ("ppo", {"tau": 1.0}, "unexpected keyword argument 'tau'"),
        ("sapo", {"tau_negative": 0.0}, "must be positive"),
        ("dro", {"beta": -1.0}, "beta must be positive"),
        ("dppo_tv", {"truncate": 1.0}, "truncate is a bound"),
        ("kl_cov", {"kl_coefficient": 0.0}, "must be positive"),
        ("kl_cov", {"share": 1.5}, "at most 1, got 1.5"),
        ("clip_cov", {"share": 0.0}, "above 0"),
        ("clip_cov", {"seed": 1}, "unexpected keyword argument 'seed'"),
    ],
)
def test_wrong_arguments_are_told_before_there_is_anything_to_train_on(name, arguments, complaint):
    with pytest.raises(ConfigError, match=complaint):
        find_loss(name).bind(arguments)


def squared(inputs, *, scale=1.0):
    return scale * inputs.weights_BT * inputs.log_ratio_BT.square()


def summed(inputs):
    return inputs.logp_BT.sum()


def by_hand(inputs):
    return TokenLosses.free(inputs.logp_BT)


WITHOUT_RATIO = PolicyLoss(function=by_hand, ratio=False)


def test_somebodys_own_loss():
    given = random_inputs()
    given["logp_BT"][given["mask_BT"] == 0] = float("nan")
    losses = find_loss(f"{__name__}:squared").bind({"scale": 2.0}).losses(LossInputs(**given))
    inside = given["mask_BT"] == 1
    assert_close(losses.values_BT[inside], (2 * given["weights_BT"] * (given["logp_BT"] - given["old_BT"]).square())[inside])
    assert (losses.values_BT[~inside] == 0).all()
    assert find_loss(f"{__name__}:WITHOUT_RATIO") is WITHOUT_RATIO


@pytest.mark.parametrize(("name", "complaint"), [("summed", r"must return a loss per token, \(1, 1\), got \(\)"), ("squared2", "has no squared2")])
def test_somebodys_own_loss_that_is_none(name, complaint):
    with pytest.raises(ConfigError, match=complaint):
        find_loss(f"{__name__}:{name}").bind({})


def test_an_unknown_name():
    with pytest.raises(ConfigError, match="expected one of ppo, gspo"):
        find_loss("pppo")


def test_a_selection_belongs_to_the_losses_that_need_one():
    assert [name for name, loss in POLICY_LOSSES.items() if loss.selection] == ["clip_cov", "kl_cov"]
    with pytest.raises(ValueError, match="needs selected_BT"):
        losses_of("clip_cov", random_inputs() | {"selected_BT": None})
