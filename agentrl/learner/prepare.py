"""What a step finds out before its first update: log-probs, values, rewards with their KL penalty, advantages.

    passes that advantages need ──> reward - KL ──> advantages ──> passes that only the loss needs, over rows with a gradient

Every rank passes its own rows through the models; the sums over ranks are everybody's. Dimensions: B trajectories, N their tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from agentrl.algorithm.advantages import AdvantageInputs, Advantages, Estimator, estimate, find_estimator
from agentrl.algorithm.controllers import adapted_coefficient
from agentrl.algorithm.importance import batch_normaliser, weight_sums
from agentrl.algorithm.kl import kl_estimate
from agentrl.algorithm.losses import find_loss
from agentrl.algorithm.value_loss import explained_sums, explained_variance
from agentrl.config.recipe import AlgorithmRecipe, KLRecipe, Recipe
from agentrl.errors import ConfigError
from agentrl.learner.batch import MicroBatch, StepTokens, TrainingBatch
from agentrl.learner.critic import CriticModel
from agentrl.learner.memory import Cut, within_memory
from agentrl.learner.objective import weigh
from agentrl.learner.policy import PolicyModel
from agentrl.learner.state import LearnerState
from agentrl.record import record
from agentrl.types import StopReason

__all__ = ["Preparation", "prepare"]

# An advantage below it is the rounding error of a group whose rewards are all equal: 1e-16 / 1e-6 and a margin.
NO_ADVANTAGE = 1e-8


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Preparation:
    """What the updates of a step start from."""

    tokens: StepTokens
    useful_B: Tensor  # bool: whether a trajectory can contribute a gradient to the policy
    mean_weight: Tensor | None  # 0-d


def prepare(state: LearnerState, batch: TrainingBatch, recipe: Recipe, *, step: int, entropy_coefficient: float, critic_alone: bool) -> Preparation:
    """Everything up to the first update. Collective.

    Args:
        critic_alone: the policy is not trained in this step: what only its loss needs is left out, and nothing adapts.
    """
    algorithm = recipe.algorithm
    estimator, method = find_estimator(algorithm.advantage.estimator), find_loss(algorithm.loss.name)
    batch = batch.over_observations() if algorithm.train_on_observations else batch
    passes = _Passes(state=state, cut=Cut.of(recipe.learner, packed=state.policy.packed), step=step)
    tokens = _start(batch, recipe)
    everything = list(range(len(batch.trajectories)))
    squares_N: Tensor | None = None
    early = algorithm.kl.where == "reward" or algorithm.train_on_observations or bool({"logp", "sum_pi_squared"} & estimator.needs)
    if early:
        tokens, squares_N = passes.proximal(tokens, everything, sum_pi_squared="sum_pi_squared" in estimator.needs)
    if algorithm.kl.where == "reward":
        tokens = passes.reference(tokens, everything)
    if state.critic is not None:
        tokens = passes.values(tokens, everything)
    tokens = _with_advantages(state, tokens, algorithm, estimator, squares_N, adapt=not critic_alone)
    if critic_alone:
        return Preparation(tokens=tokens, useful_B=torch.zeros(len(everything), dtype=torch.bool), mean_weight=None)
    every_token = entropy_coefficient > 0 or algorithm.kl.where == "loss"
    useful_B = _useful(tokens, every_token=every_token)
    useful = useful_B.nonzero()[:, 0].tolist()
    weighted = algorithm.proximal == "recompute" or not method.ratio
    if not early and (algorithm.proximal == "recompute" or (weighted and algorithm.importance.normalise)):
        tokens, _ = passes.proximal(tokens, everything if algorithm.importance.normalise else useful)
    if algorithm.kl.where == "loss":
        tokens = passes.reference(tokens, useful)
    mean_weight = _mean_weight(tokens, algorithm) if weighted and algorithm.importance.normalise else None
    return Preparation(tokens=tokens, useful_B=useful_B, mean_weight=mean_weight)


def _start(batch: TrainingBatch, recipe: Recipe) -> StepTokens:
    algorithm = recipe.algorithm
    masked = frozenset(StopReason(name) for name, treatment in recipe.buffer.stops.model_dump().items() if treatment == "mask")
    over_all = algorithm.gae_over_observations or algorithm.train_on_observations
    train_mask_N = batch.train_mask(algorithm.max_token_age, masked)
    generated = batch.loss_mask_N.sum().item()
    if generated:
        record("learner/train_mask_share", train_mask_N.sum().item() / generated)
    record("learner/tokens", train_mask_N.sum().item())
    return StepTokens.of(batch, critic_mask_N=batch.response_N if over_all else batch.loss_mask_N, train_mask_N=train_mask_N)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Passes:
    """Forward passes over a batch, without gradients."""

    state: LearnerState
    cut: Cut
    step: int

    def proximal(self, tokens: StepTokens, rows: Sequence[int], *, sum_pi_squared: bool = False) -> tuple[StepTokens, Tensor | None]:
        """The policy's log-probs now; with them, where asked for, the sum of its squared probabilities at each token.

        Observations that are trained on have no behaviour: it is then the policy as it is now.
        """

        def forward(micro: MicroBatch) -> tuple[Tensor, ...]:
            outputs: tuple[Tensor, ...] = self.state.policy(
                micro.token_ids_RT, micro.loss_mask_RT, micro.temperature_R, sum_pi_squared=sum_pi_squared
            )
            return (outputs[0], *outputs[2:])

        proximal_N, *squares = self._sweep(tokens, rows, forward, self.state.policy, outputs=2 if sum_pi_squared else 1)
        behaviour_N = tokens.behaviour_N.where(tokens.batch.generated_N, proximal_N)
        return replace(tokens, proximal_N=proximal_N, behaviour_N=behaviour_N), squares[0] if squares else None

    def reference(self, tokens: StepTokens, rows: Sequence[int]) -> StepTokens:
        """The reference policy's log-probs."""
        reference = self.state.reference
        if reference is None:
            raise ConfigError("algorithm.kl needs a reference policy, and this learner was built without one")

        def forward(micro: MicroBatch) -> tuple[Tensor, ...]:
            return (reference.logprobs(micro.token_ids_RT, micro.loss_mask_RT, micro.temperature_R),)

        [reference_N] = self._sweep(tokens, rows, forward, reference.model, outputs=1)
        return replace(tokens, reference_N=reference_N)

    def values(self, tokens: StepTokens, rows: Sequence[int]) -> StepTokens:
        """The critic's values."""
        critic = self.state.critic
        assert critic is not None

        def forward(micro: MicroBatch) -> tuple[Tensor, ...]:
            return (critic(micro.token_ids_RT, micro.critic_mask_RT),)

        [values_N] = self._sweep(tokens, rows, forward, critic, outputs=1)
        return replace(tokens, values_N=values_N)

    def _sweep(
        self,
        tokens: StepTokens,
        rows: Sequence[int],
        forward: Callable[[MicroBatch], tuple[Tensor, ...]],
        model: PolicyModel | CriticModel,
        *,
        outputs: int,
    ) -> list[Tensor]:
        """Pass rows through a model; what comes out, laid end to end like the batch, 0 for rows that were not asked for."""
        batch, ranks = tokens.batch, self.state.ranks

        @torch.no_grad()
        def work(cut: Cut) -> list[Tensor]:
            found = [torch.zeros_like(batch.behaviour_N) for _ in range(outputs)]
            for micro_rows in cut.micro_batches(batch, rows, ranks):
                answers = forward(tokens.micro_batch(micro_rows, ranks.device))
                for whole_N, answer_RT in zip(found, answers, strict=True):
                    for row, answer_T in zip(micro_rows, answer_RT.cpu(), strict=False):
                        start, length = int(batch.starts_B[row]), int(batch.lengths_B[row])
                        whole_N[start : start + length] = answer_T[:length]
            return found

        wanted_N = tokens.critic_mask_N if isinstance(model, CriticModel) else batch.loss_mask_N
        self.state.work.passed(model.shape, batch, rows, wanted_N, backward=False)
        longest = int(batch.lengths_B.max())
        found = within_memory(work, self.cut, models=[model], ranks=ranks, step=self.step, longest=longest)
        return [ranks.sum(whole_N) for whole_N in found]


def _with_advantages(
    state: LearnerState, tokens: StepTokens, algorithm: AlgorithmRecipe, estimator: Estimator, squares_N: Tensor | None, *, adapt: bool
) -> StepTokens:
    """The tokens with advantages and the critic's targets. Advantage metrics are over generated tokens."""
    batch, recipe = tokens.batch, algorithm.advantage
    if "baselines" in estimator.needs and batch.baselines_B is None:
        raise ConfigError(f"estimator {recipe.estimator} needs a greedy episode of every group, and a group came without")
    rewards_N = batch.amounts_N
    if algorithm.kl.where == "reward":
        rewards_N = rewards_N - _kl_penalty(state, tokens, algorithm.kl, adapt=adapt)
    padded = batch.padded
    inputs = AdvantageInputs(
        rewards_BT=padded(rewards_N),
        mask_BT=padded(tokens.critic_mask_N),
        groups_B=batch.groups_B,
        values_BT=padded(tokens.values_N.double()) if state.critic is not None else None,
        baselines_B=batch.baselines_B,
        parts_BK=_parts(batch, recipe.options["parts"]) if "parts" in recipe.options else None,
        logp_BT=padded(tokens.proximal_N.double()),
        behaviour_BT=padded(tokens.behaviour_N.double()),
        sum_pi_squared_BT=None if squares_N is None else padded(squares_N.double()),
    )
    found: Advantages = estimate(recipe.estimator, inputs, gamma=recipe.gamma, lam=recipe.lam, whiten=recipe.whiten, options=recipe.options)
    advantages_N = batch.flat(found.advantages_BT).float()
    own_N = advantages_N[batch.loss_mask_N]
    if len(own_N):
        record("learner/advantage_mean", own_N.mean().item())
        record("learner/advantage_std", own_N.std(correction=0).item())
    returns_N = tokens.returns_N if found.returns_BT is None else batch.flat(found.returns_BT).float()
    if found.returns_BT is not None:
        record("critic/explained_variance", explained_variance(explained_sums(tokens.values_N, returns_N, tokens.critic_mask_N)))
    return replace(tokens, advantages_N=advantages_N, returns_N=returns_N)


def _parts(batch: TrainingBatch, names: Sequence[str]) -> Tensor:
    there = {part for trajectory in batch.trajectories for part in trajectory.reward.parts}
    if there and not there & set(names):  # one that is there now and then is earned now and then
        raise ConfigError(f"algorithm.advantage.options.parts: rewards have the parts {', '.join(sorted(there))}, and none of {', '.join(names)}")
    return batch.parts(names)


def _kl_penalty(state: LearnerState, tokens: StepTokens, recipe: KLRecipe, *, adapt: bool) -> Tensor:
    """[N] float64: what the leash takes off each generated token's reward. Adapts the coefficient for the next step where the recipe says so."""
    batch, controllers = tokens.batch, state.controllers
    coefficient = recipe.coefficient if controllers.kl_coefficient is None else controllers.kl_coefficient
    estimates_N = kl_estimate(recipe.estimate, tokens.proximal_N.double(), tokens.reference_N.double()) * batch.loss_mask_N
    tokens_B = batch.count(batch.loss_mask_N)
    sums_B = torch.zeros(len(tokens_B), dtype=torch.float64).index_add_(0, batch.spread(torch.arange(len(tokens_B))), estimates_N)
    mean = (sums_B / tokens_B.clamp(min=1)).mean().item()
    record("learner/kl_reference", mean)
    record("learner/kl_coefficient", coefficient)
    if recipe.controller == "adaptive" and adapt:
        settings: dict[str, Any] = {"target": recipe.target, "horizon": recipe.horizon}
        controllers.kl_coefficient = adapted_coefficient(coefficient, kl=mean, samples=len(tokens_B), **settings)
    return coefficient * estimates_N


def _useful(tokens: StepTokens, *, every_token: bool) -> Tensor:
    """[B] bool: whether a trajectory can contribute a gradient. Others stay in the denominators and are not computed.

    With an entropy bonus or a KL in the loss every token trained on can. An advantage that is not a number counts: its loss must be seen
    to be skipped.
    """
    counts_N = tokens.train_mask_N if every_token else tokens.train_mask_N & ~(tokens.advantages_N.abs() <= NO_ADVANTAGE)
    return tokens.batch.count(counts_N) > 0


def _mean_weight(tokens: StepTokens, algorithm: AlgorithmRecipe) -> Tensor:
    """The batch's mean importance weight, which weights are divided by."""
    batch = tokens.batch
    mask_BT = batch.padded(batch.loss_mask_N)
    weights_BT, _ = weigh(batch.padded(tokens.proximal_N), batch.padded(tokens.behaviour_N), mask_BT, algorithm.importance)
    return batch_normaliser(*weight_sums(weights_BT, mask_BT, level=algorithm.importance.level)).float()
