"""Each policy loss on numbers a reader can redo."""

import math

import torch
from torch import tensor
from torch.testing import assert_close

from agentrl.algorithm.aggregation import Denominators, aggregate
from agentrl.algorithm.losses import LossInputs, find_loss

LN2 = math.log(2)


def losses_of(name, *, logp, old, advantages, mask=None, weights=None, selected=None, **arguments):
    """Losses of the rows' tokens, and their gradient with respect to logp where they are added up."""
    logp_BT = torch.as_tensor(logp, dtype=torch.float64).requires_grad_()
    ones_BT = torch.ones_like(logp_BT)
    inputs = LossInputs(
        logp_BT=logp_BT,
        old_BT=tensor(old, dtype=torch.float64),
        advantages_BT=tensor(advantages, dtype=torch.float64),
        mask_BT=ones_BT if mask is None else tensor(mask),
        weights_BT=ones_BT if weights is None else tensor(weights, dtype=torch.float64),
        selected_BT=None if selected is None else tensor(selected),
    )
    losses = find_loss(name).bind(arguments).losses(inputs)
    losses.values_BT.sum().backward()
    return losses, logp_BT.grad


def close(found, expected):
    assert_close(found.detach(), tensor(expected, dtype=torch.float64), atol=1e-4, rtol=0)


def test_ppo():
    # ratios 2, .5, 1, 2, held to .8..1.2: -min(2, 1.2), -min(-.5, -.8), -3, -min(-2, -1.2)
    losses, gradient = losses_of("ppo", logp=[[LN2, -LN2, 0, LN2]], old=[[0, 0, 0, 0]], advantages=[[1, -1, 3, -1]])
    close(losses.values_BT, [[-1.2, 0.8, -3, 2]])
    close(gradient, [[0, 0, -3, 2]])  # none where the bound holds, -ratio * advantage elsewhere
    assert losses.clipped_high_BT.tolist() == [[True, False, False, False]]
    assert losses.clipped_low_BT.tolist() == [[False, True, False, False]]
    assert not losses.capped_BT.any()


def test_ppo_with_a_higher_upper_bound_and_weights():
    losses, gradient = losses_of("ppo", logp=[[LN2, LN2]], old=[[0, 0]], advantages=[[1, -1]], weights=[[2, 0.5]], clip_high=0.5)
    close(losses.values_BT, [[-2 * 1.5, 0.5 * 2]])
    close(gradient, [[0, 1]])


def test_dual_clip_bounds_what_a_bad_token_can_cost():
    # ratios 4, 2 and 4: above 3 with a negative advantage the loss is 3 * |A|
    losses, gradient = losses_of("ppo", logp=[[2 * LN2, LN2, 2 * LN2]], old=[[0, 0, 0]], advantages=[[-2, -2, 1]], dual_clip=3.0)
    close(losses.values_BT, [[6, 4, -1.2]])
    close(gradient, [[0, 4, 0]])
    assert losses.capped_BT.tolist() == [[True, False, False]]


def test_reinforce_and_gpg():
    for name in ("reinforce", "gpg"):
        losses, gradient = losses_of(name, logp=[[-0.5, -1]], old=[[-9, -9]], advantages=[[3, -1]], weights=[[2, 1]])
        close(losses.values_BT, [[-2 * 3 * -0.5, -1 * -1 * -1]])
        close(gradient, [[-6, 1]])


def test_gspo_gives_each_token_the_trajectorys_ratio():
    # log-ratios ln 4 and 0, an observation between them: s = exp((ln 4 + 0) / 2) = 2 on both tokens
    logp, old = [[2 * LN2, 7, 0], [2 * LN2, 7, 0]], [[0, -7, 0], [0, -7, 0]]
    arguments = {"mask": [[1, 0, 1], [1, 0, 1]], "advantages": [[1, 1, 1], [-1, -1, -1]], "clip_low": 0.2, "clip_high": 0.2}
    losses, gradient = losses_of("gspo", logp=logp, old=old, **arguments)
    close(losses.values_BT, [[-1.2, 0, -1.2], [2, 0, 2]])
    close(gradient, [[0, 0, 0], [2, 0, 2]])  # of the token's own log-prob: s * |A|, whatever the token's own ratio
    assert losses.clipped_high_BT.tolist() == [[True, False, True], [False, False, False]]


def test_gmpo_is_the_geometric_mean_of_bounded_ratios():
    # A = 2: log-ratios 1 (held to .4), .2, 0: mean .2. A = -1: -1 (held to -.4), .2, .2: mean 0
    losses, gradient = losses_of("gmpo", logp=[[1, 0.2, 0], [-1, 0.2, 0.2]], old=[[0, 0, 0], [0, 0, 0]], advantages=[[2, 2, 2], [-1, -1, -1]])
    one, other = -2 * math.exp(0.2), 1.0
    close(losses.values_BT, [[one] * 3, [other] * 3])
    close(gradient, [[0, one, one], [0, other, other]])  # three tokens carry the loss, a third of the mean log-ratio each
    assert losses.clipped_high_BT.tolist()[0] == [True, False, False]
    assert losses.clipped_low_BT.tolist()[1] == [True, False, False]


def test_gmpo_aggregates_to_the_mean_over_trajectories_and_weighs_them_by_the_geometric_mean():
    logp, mask = torch.zeros(2, 3), tensor([[1, 1, 0], [1, 1, 1]])
    losses, _ = losses_of("gmpo", logp=logp, old=[[0] * 3] * 2, advantages=[[3] * 3, [-1] * 3], weights=[[4, 1, 9], [1, 1, 1]], mask=mask.tolist())
    # ratios 1: -3 * sqrt(4 * 1) and 1
    mean = aggregate(losses.values_BT, mask, how="seq_mean_token_mean", denominators=Denominators.of(mask))
    assert math.isclose(mean.item(), (-6 + 1) / 2, rel_tol=1e-9)


def test_cispo_bounds_the_weight_and_keeps_every_gradient():
    # ratios 2 (held to 1.2), .5 (no lower bound), 1
    old = [[-1 - LN2, -2 + LN2, -0.5]]
    losses, gradient = losses_of("cispo", logp=[[-1, -2, -0.5]], old=old, advantages=[[1, 2, -1]])
    close(losses.values_BT, [[1.2, 0.5 * 2 * 2, -0.5]])
    close(gradient, [[-1.2, -1, 1]])
    assert losses.clipped_high_BT.tolist() == [[True, False, False]]
    assert not losses.clipped_low_BT.any()


def test_sapo_fades_softly():
    # sigmoid(tau (r - 1)) 4 / tau: at r = 1 it is 2 / tau with slope 1; at r = 3 with tau 1 it is 4 sigmoid(2) with slope 4 * .8808 * .1192
    losses, gradient = losses_of("sapo", logp=[[0, 0, math.log(3)]], old=[[0, 0, 0]], advantages=[[1, -1, 1]])
    close(losses.values_BT, [[-2, 2 / 1.05, -3.5232]])
    close(gradient, [[-1, 1, -3 * 0.41997]])


def test_dppo_tv_drops_what_moved_too_far_in_probability():
    # .5 became .6 (inside .15), .7 and .3 (outside, in the advantage's direction), .3 (against it: kept)
    logp = tensor([[0.6, 0.7, 0.3, 0.3]]).log()
    losses, gradient = losses_of("dppo_tv", logp=logp, old=[[-LN2] * 4], advantages=[[1, 1, -1, 1]])
    close(losses.values_BT, [[-1.2 * math.log(0.6), 0, 0, -0.6 * math.log(0.3)]])
    close(gradient, [[-1.2, 0, 0, -0.6]])
    assert losses.clipped_high_BT.tolist() == [[False, True, False, False]]
    assert losses.clipped_low_BT.tolist() == [[False, False, True, False]]


def test_dppo_kl_drops_what_diverged_and_keeps_a_rare_token():
    # .5 -> .6: .5 ln(5/6) + .5 ln(5/4) = .0204, inside .05. .5 -> .8: .5 ln(5/8) + .5 ln(5/2) = .2231, outside
    # 1e-5 -> 1e-3: .0009, inside; its ratio 100 is truncated at 20
    logp = tensor([[0.6, 0.8, 1e-3]], dtype=torch.float64).log()
    losses, gradient = losses_of("dppo_kl", logp=logp, old=[[-LN2, -LN2, math.log(1e-5)]], advantages=[[1, 1, 1]])
    close(gradient, [[-1.2, 0, -20]])
    assert losses.clipped_high_BT.tolist() == [[False, True, False]]
    assert losses.capped_BT.tolist() == [[False, False, True]]


def test_dro_pulls_back_by_the_square_of_the_log_ratio():
    # log-ratio 1: -(3 * -1 - .25 * 1); its slope -(3 - .5 * 1)
    losses, gradient = losses_of("dro", logp=[[-1]], old=[[-2]], advantages=[[3]], beta=0.5)
    close(losses.values_BT, [[3.25]])
    close(gradient, [[-2.5]])


def test_clip_cov_is_ppo_without_the_selected_tokens():
    losses, gradient = losses_of("clip_cov", logp=[[0, 0, LN2]], old=[[0, 0, 0]], advantages=[[1, 2, 1]], selected=[[True, False, False]])
    close(losses.values_BT, [[0, -2, -1.2]])
    close(gradient, [[0, -2, 0]])
    assert losses.capped_BT.tolist() == [[True, False, False]]


def test_kl_cov_pulls_the_selected_tokens_back():
    # ratio 2 twice: -2, and -2 + .1 |ln 2| with slope -2 + .1
    losses, gradient = losses_of("kl_cov", logp=[[LN2, LN2]], old=[[0, 0]], advantages=[[1, 1]], selected=[[False, True]])
    close(losses.values_BT, [[-2, -2 + 0.1 * LN2]])
    close(gradient, [[-2, -1.9]])
