import pytest
import torch
from torch import tensor
from torch.testing import assert_close

from agentrl.algorithm.losses import clipped_policy_loss, decoupled_policy_loss

LN2 = 0.6931471805599453


def test_clipped_loss_by_hand():
    # ratios 2, .5, 1, 2; clipped to 1.2, .8, 1, 1.2; advantages 1, -1, 3, -1
    logp, behaviour = tensor([[LN2, -LN2, 0.0, LN2]]), torch.zeros(1, 4)
    advantages, mask = tensor([[1.0, -1.0, 3.0, -1.0]]), torch.ones(1, 4)
    loss, stats = clipped_policy_loss(logp, behaviour, advantages, mask, clip_low=0.2, clip_high=0.2, denominator=tensor(8))
    # -min(2, 1.2) - min(-.5, -.8) - 3 - min(-2, -1.2) = -1.2 + .8 - 3 + 2
    assert_close(loss, tensor(-1.4 / 8))
    assert (stats.clipped_high.item(), stats.clipped_low.item(), stats.tokens.item()) == (1, 1, 4)


def test_gradient_is_zero_where_the_bound_holds_and_minus_ratio_times_advantage_elsewhere():
    logp = tensor([[LN2, -LN2, 0.0, LN2]], requires_grad=True)
    advantages, mask = tensor([[1.0, -1.0, 3.0, -1.0]]), torch.ones(1, 4)
    loss, _ = clipped_policy_loss(logp, torch.zeros(1, 4), advantages, mask, clip_low=0.2, clip_high=0.2, denominator=tensor(1))
    loss.backward()
    assert_close(logp.grad, tensor([[0.0, 0.0, -3.0, 2.0]]))


@pytest.mark.parametrize("masked", [float("nan"), float("inf"), 5.0])
def test_a_masked_token_adds_nothing_whatever_it_holds(masked):
    logp = tensor([[-1.0, -1.0]], requires_grad=True)
    advantages, mask = tensor([[1.0, masked]]), tensor([[1.0, 0.0]])
    loss, _ = clipped_policy_loss(logp, tensor([[-1.0, 3.0]]), advantages, mask, clip_low=0.2, clip_high=0.2, denominator=tensor(2))
    loss.backward()
    assert loss.item() == -0.5
    assert logp.grad[0, 0].item() == -0.5
    if masked == masked and abs(masked) != float("inf"):
        assert logp.grad[0, 1].item() == 0.0


def test_decoupled_loss_by_hand():
    # proximal/behaviour 4 cut at 2, and .5; current/proximal 1.1 and 1
    behaviour, proximal = tensor([[0.0, 0.0]]), tensor([[2 * LN2, -LN2]])
    logp = proximal + tensor([[1.1, 1.0]]).log()
    loss, stats = decoupled_policy_loss(
        *(logp, proximal, behaviour, tensor([[1.0, -1.0]]), torch.ones(1, 2)), clip_low=0.2, clip_high=0.2, truncate=2.0, denominator=tensor(2)
    )
    assert_close(loss, tensor((-2 * 1.1 + 0.5) / 2))
    assert_close(stats.importance, tensor(2.5))
    assert stats.truncated.item() == 1


def test_decoupled_with_the_behaviour_as_proximal_is_the_two_policy_form():
    generator = torch.Generator().manual_seed(0)
    logp, behaviour, advantages = (torch.randn(3, 5, generator=generator) for _ in range(3))
    mask = (torch.rand(3, 5, generator=generator) < 0.5).float()
    settings = {"clip_low": 0.1, "clip_high": 0.3, "denominator": tensor(9)}
    two, _ = clipped_policy_loss(logp, behaviour, advantages, mask, **settings)
    decoupled, _ = decoupled_policy_loss(logp, behaviour, behaviour, advantages, mask, truncate=2.0, **settings)
    assert two.item() == decoupled.item()


def test_the_weight_carries_no_gradient():
    logp = tensor([[0.1]], requires_grad=True)
    loss, _ = decoupled_policy_loss(
        *(logp, logp, tensor([[0.0]]), tensor([[1.0]]), torch.ones(1, 1)), clip_low=0.2, clip_high=0.2, truncate=2.0, denominator=tensor(1)
    )
    loss.backward()
    # weight e^.1 is a constant; the ratio is 1 with derivative 1 - 1: proximal is held as given
    assert logp.grad is not None
    assert logp.grad.abs().item() < 1e-7


def test_a_huge_log_ratio_stays_finite():
    loss, _ = clipped_policy_loss(
        tensor([[0.0]]), tensor([[-500.0]]), tensor([[-1.0]]), torch.ones(1, 1), clip_low=0.2, clip_high=0.2, denominator=tensor(1)
    )
    assert_close(loss, tensor(20.0).exp())
