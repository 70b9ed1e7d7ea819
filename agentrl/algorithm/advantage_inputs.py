"""What an advantage estimator is given and what it gives back. B trajectories, T tokens, K parts of the reward."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["AdvantageInputs", "Advantages"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AdvantageInputs:
    """The trajectories of a batch, right-padded. Outside the mask anything may stand but in `rewards_BT`.

    A reward on a token outside the mask is not lost: it belongs to the generated token before it, and to the first one where none is before.
    For the chunks P0 + A0 + O0 + A1 of prompt, action, observation and action, of two tokens each:

        mask_BT        0 0  1 1  0 0  1 1
        rewards_BT     0 0  0 a  b 0  0 c      a + b were earned by the last token of A0, c by the last of A1
    """

    rewards_BT: Tensor  # float64: what each token earned, 0 elsewhere
    mask_BT: Tensor  # bool: generated tokens (with observations in GAE: all tokens after the prompt)
    groups_B: Tensor  # int64: 0..G-1, in any order
    values_BT: Tensor | None = None  # critic: value of the state each token was generated from
    baselines_B: Tensor | None = None  # reward of the group's greedy episode (ReMax)
    parts_BK: Tensor | None = None  # the reward's named parts (GDPO), columns in the order of the option `parts`
    logp_BT: Tensor | None = None  # the learner's log-probs at the start of the step
    behaviour_BT: Tensor | None = None  # the engine's
    sum_pi_squared_BT: Tensor | None = None  # sum over the vocabulary of the learner's squared probabilities where each token was sampled

    @property
    def scores_B(self) -> Tensor:
        """Total reward of each trajectory."""
        return self.rewards_BT.sum(1)

    def tiled(self, values_B: Tensor) -> Advantages:
        """One advantage per trajectory, for each of its generated tokens."""
        return Advantages(advantages_BT=values_B[:, None].where(self.mask_BT.bool(), 0.0))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Advantages:
    """How much better than expected each token was. 0 outside the mask."""

    advantages_BT: Tensor
    returns_BT: Tensor | None = None  # the critic's targets, where the estimator makes any

    def within(self, mask_BT: Tensor) -> Advantages:
        """The same with zeros outside the mask, whatever stood there."""
        outside_BT = ~mask_BT.bool()
        returns_BT = None if self.returns_BT is None else self.returns_BT.masked_fill(outside_BT, 0.0)
        return Advantages(advantages_BT=self.advantages_BT.masked_fill(outside_BT, 0.0), returns_BT=returns_BT)

    @classmethod
    def of(cls, found: Tensor | Advantages, inputs: AdvantageInputs) -> Advantages:
        """What an estimator returned, [B], [B, T] or `Advantages`, with zeros outside the mask.

        Raises:
            ValueError: another type or shape.
        """
        advantages = inputs.tiled(found) if isinstance(found, Tensor) and found.shape == inputs.groups_B.shape else found
        advantages = cls(advantages_BT=advantages) if isinstance(advantages, Tensor) else advantages
        if not isinstance(advantages, Advantages):
            raise ValueError(f"expected advantages as a Tensor [B], [B, T] or Advantages, got {type(found).__name__}")
        expected = inputs.mask_BT.shape
        for part in (advantages.advantages_BT, advantages.returns_BT):
            if part is not None and part.shape != expected:
                raise ValueError(f"expected advantages of shape {list(expected)} or [{expected[0]}], got {list(part.shape)}")
        return advantages.within(inputs.mask_BT)
