import pytest
import torch
from torch import tensor
from torch.testing import assert_close

from agentrl.algorithm.aggregation import Denominators, aggregate

# three trajectories of 3, 1 and no generated tokens, and what each token costs
MASK = tensor([[1.0, 0, 1, 1], [0, 1, 0, 0], [0, 0, 0, 0]])
VALUES = tensor([[1.0, 9, 2, 3], [9, 8, 9, 9], [9, 9, 9, 9]])


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("token_mean", (1 + 2 + 3 + 8) / 4),
        ("token_sum", 1 + 2 + 3 + 8),
        ("seq_mean_token_sum", (6 + 8) / 2),
        ("seq_mean_token_sum_norm", (6 + 8) / 2 / 10),
        ("seq_mean_token_mean", (6 / 3 + 8 / 1) / 2),
    ],
)
def test_aggregations_by_hand(how, expected):
    assert aggregate(VALUES, MASK, how=how, denominators=Denominators.of(MASK, horizon=10.0)).item() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("token_mean", (1 + 2 + 8) / 4),
        ("seq_mean_token_sum", (3 + 8) / 2),
        ("seq_mean_token_mean", (3 / 3 + 8) / 2),
    ],
)
def test_masking_a_token_does_not_make_the_others_heavier(how, expected):
    train_mask = MASK.clone()
    train_mask[0, 3] = 0
    assert aggregate(VALUES, train_mask, how=how, denominators=Denominators.of(MASK)).item() == pytest.approx(expected)


def test_a_nan_outside_the_mask_reaches_neither_value_nor_gradient():
    values = VALUES.masked_fill(MASK == 0, float("nan")).requires_grad_()
    total = aggregate(values, MASK, how="token_mean", denominators=Denominators.of(MASK))
    total.backward()
    assert total.item() == 3.5
    assert_close(values.grad, MASK / 4)


def test_a_part_keeps_the_updates_counts():
    part = Denominators.of(MASK, horizon=5.0).rows([1])
    assert (part.tokens.item(), part.sequences.item(), part.row_tokens_B.tolist(), part.horizon) == (4, 2, [1], 5.0)


def test_nothing_generated_is_zero_and_finite():
    nothing = torch.zeros(2, 3)
    assert aggregate(torch.ones(2, 3), nothing, how="seq_mean_token_mean", denominators=Denominators.of(nothing)).item() == 0


def test_what_cannot_be_aggregated_is_told():
    with pytest.raises(ValueError, match="expected one of token_mean, token_sum"):
        aggregate(VALUES, MASK, how="mean", denominators=Denominators.of(MASK))
    with pytest.raises(ValueError, match="needs a horizon"):
        aggregate(VALUES, MASK, how="seq_mean_token_sum_norm", denominators=Denominators.of(MASK))
