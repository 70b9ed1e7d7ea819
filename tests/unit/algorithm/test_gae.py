import pytest
from torch import nan, tensor, zeros
from torch.testing import assert_close

from agentrl.algorithm.gae import gae, reward_to_go, vtrace

# Two generated tokens, an observation, one more token. With gamma .5 the temporal differences are
#   0 + .5 * 1 - 2 = -1.5      1 + .5 * 4 - 1 = 2      3 - 4 = -1
MASK = tensor([[True, True, False, True]])
REWARDS = tensor([[0.0, 1.0, 0.0, 3.0]])
VALUES = tensor([[2.0, 1.0, nan, 4.0]])


def test_gae_by_hand():
    # lambda .5: -1, then 2 + .25 * -1 = 1.75, then -1.5 + .25 * 1.75 = -1.0625
    found = gae(REWARDS, VALUES, MASK, gamma=0.5, lam=0.5)
    assert_close(found.advantages_BT, tensor([[-1.0625, 1.75, 0.0, -1.0]]))
    assert_close(found.returns_BT, tensor([[0.9375, 2.75, 0.0, 3.0]]))


def test_gae_does_not_lose_a_reward_on_an_observation():
    on_the_observation = tensor([[0.0, 0.0, 1.0, 3.0]])
    found = gae(on_the_observation, VALUES, MASK, gamma=0.5, lam=0.5)
    assert_close(found.advantages_BT, tensor([[-1.0625, 1.75, 0.0, -1.0]]))


def test_reward_to_go_by_hand():
    # the observation's 4 is the second token's: 2, then 4 + .5 * 2 = 5, then 1 + .5 * 5 = 3.5
    assert_close(reward_to_go(tensor([[1.0, 0.0, 4.0, 2.0]]), MASK, gamma=0.5), tensor([[3.5, 5.0, 0.0, 2.0]]))


def test_a_reward_before_the_first_generated_token_is_that_tokens():
    assert_close(reward_to_go(tensor([[3.0, 0.0, 1.0]]), tensor([[False, True, True]]), gamma=0.5), tensor([[0.0, 3.5, 1.0]]))


def test_a_trajectory_without_a_generated_token_has_no_reward_to_go():
    assert reward_to_go(tensor([[1.0, 2.0]]), tensor([[False, False]])).tolist() == [[0.0, 0.0]]


def test_vtrace_by_hand():
    # ratios .5, 2, .25, so rho and c are .5, 1, .25. v - V: .25 * -1 = -.25, then 1 * 2 + .5 * 1 * -.25 = 1.875,
    # then .5 * -1.5 + .5 * .5 * 1.875 = -.28125. Advantages: 3 - 4, then 1 + .5 * 3.75 - 1, then 0 + .5 * 2.875 - 2
    ratios = tensor([[0.5, 2.0, nan, 0.25]])
    found = vtrace(REWARDS, VALUES, MASK, ratios.log(), zeros(1, 4), gamma=0.5, lam=1.0)
    assert_close(found.returns_BT, tensor([[1.71875, 2.875, 0.0, 3.75]]))
    assert_close(found.advantages_BT, tensor([[-0.5625, 1.875, 0.0, -1.0]]))


def test_vtrace_has_bounds_of_its_own_for_differences_and_traces():
    # rho 2 for the second token, its c 1: v - V = 2 * 2 + .5 * 1 * -.25 = 3.875
    ratios = tensor([[0.5, 2.0, nan, 0.25]])
    found = vtrace(REWARDS, VALUES, MASK, ratios.log(), zeros(1, 4), gamma=0.5, lam=1.0, rho_bar=4.0, c_bar=1.0)
    assert_close(found.returns_BT[0, 1:], tensor([4.875, 0.0, 3.75]))


def test_vtrace_of_the_learners_own_tokens_is_gae_with_lambda_one():
    logp = tensor([[-1.0, -2.0, nan, -0.5]])
    ours = vtrace(REWARDS, VALUES, MASK, logp, logp, gamma=0.9, lam=1.0)
    theirs = gae(REWARDS, VALUES, MASK, gamma=0.9, lam=1.0)
    assert_close(ours.advantages_BT, theirs.advantages_BT)
    assert_close(ours.returns_BT, theirs.returns_BT)


@pytest.mark.parametrize(("rho_bar", "c_bar"), [(1.0, 2.0), (1.0, 0.0), (nan, 1.0)])
def test_vtrace_refuses_bounds_its_proof_excludes(rho_bar, c_bar):
    with pytest.raises(ValueError, match="rho_bar >= c_bar > 0"):
        vtrace(REWARDS, VALUES, MASK, VALUES, VALUES, gamma=1.0, lam=1.0, rho_bar=rho_bar, c_bar=c_bar)
