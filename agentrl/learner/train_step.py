"""One training step, top to bottom. B trajectories of a batch, N its tokens, R x T a micro-batch."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from agentrl.algorithm.advantages import group_relative_advantages
from agentrl.algorithm.losses import LossStats, clipped_policy_loss, decoupled_policy_loss
from agentrl.algorithm.packing import MicroBatches, pack
from agentrl.algorithm.schedules import entropy_coefficient, learning_rate
from agentrl.config.recipe import AlgorithmRecipe, Recipe
from agentrl.learner.batch import MicroBatch, StepTokens, TrainingBatch
from agentrl.learner.optimizer import apply_gradients
from agentrl.learner.policy import PolicyModel
from agentrl.learner.ranks import Ranks
from agentrl.learner.tally import Tally
from agentrl.record import phase, record
from agentrl.seeds import mix

__all__ = ["LearnerState", "train_step"]

# An advantage below it is the rounding error of a group whose rewards are all equal: 1e-16 / 1e-6 and a margin.
NO_ADVANTAGE = 1e-8


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LearnerState:
    """What a step changes, and where it runs."""

    policy: PolicyModel
    optimizer: torch.optim.AdamW
    ranks: Ranks


def train_step(state: LearnerState, batch: TrainingBatch, recipe: Recipe, *, step: int, progress: float) -> list[bool]:
    """One batch, start to end: advantages, the proximal policy, then the updates.

    Every rank holds the whole batch and makes the same plan; it passes its own micro-batches through the model. Denominators count the
    whole update, over all ranks; FSDP averages gradients over ranks, hence `loss * size`.

    Returns:
        For each update whether it was done, or skipped because its loss or gradient norm was not finite.
    """
    learner, algorithm, ranks = recipe.learner, recipe.algorithm, state.ranks
    rate = learning_rate(learner.learning_rate, **learner.schedule.model_dump(), step=step, progress=progress)
    entropy_weight = entropy_coefficient(algorithm.entropy.coefficient, schedule=algorithm.entropy.schedule, progress=progress)
    record("learner/learning_rate", rate)
    record("learner/entropy_coefficient", entropy_weight)
    with phase("prepare"):
        tokens = _with_advantages(batch, algorithm)
        useful_B = _has_gradient(tokens, entropy_weight)
        minibatches = _split(len(batch.trajectories), learner.mini_batches, learner.ppo_epochs, seed=mix(recipe.seed, step))
        if algorithm.proximal == "recompute" and len(minibatches) > 1:
            tokens = _with_proximal(state, tokens, useful_B, learner.tokens_per_micro_batch)
    done: list[bool] = []
    for rows in minibatches:
        with phase("update"):
            tally = Tally(ranks)
            denominator = batch.count(batch.loss_mask_N)[rows].sum().clamp(min=1).to(ranks.device)
            micro_batches = _pack_useful(batch, rows, useful_B, learner.tokens_per_micro_batch, ranks)
            for index, micro_rows in enumerate(micro_batches):
                state.policy.sync_gradients(index == len(micro_batches) - 1)
                micro = tokens.micro_batch(micro_rows, ranks.device)
                logp_RT, entropy_RT = state.policy(micro.token_ids_RT, micro.loss_mask_RT, micro.temperature_R)
                policy_loss, stats = _policy_loss(logp_RT, micro, algorithm, denominator, one_update=len(minibatches) == 1)
                loss = policy_loss - entropy_weight * (entropy_RT * micro.train_mask_RT).sum() / denominator
                torch.autograd.backward(loss * ranks.size)
                tally.add(loss, policy_loss, logp_RT, entropy_RT, stats, micro)
            tally.reduce()
            done.append(apply_gradients(state.optimizer, loss=tally.loss, learning_rate=rate, max_grad_norm=learner.max_grad_norm))
            if done[-1]:
                tally.record_update(decoupled=algorithm.proximal == "recompute")
            if done == [True]:
                tally.record_gap()
    return done


def _with_advantages(batch: TrainingBatch, algorithm: AlgorithmRecipe) -> StepTokens:
    """The batch with each token's advantage and train mask. Advantage metrics are over generated tokens."""
    advantages_B = group_relative_advantages(batch.rewards_B, batch.groups_B, normalise_by_std=algorithm.advantage.estimator == "grpo")
    advantages_N = batch.spread(advantages_B.float())
    train_mask_N = batch.train_mask(algorithm.max_token_age)
    generated = batch.loss_mask_N.sum().item()
    if generated:
        record("learner/advantage_mean", advantages_N[batch.loss_mask_N].mean().item())
        record("learner/advantage_std", advantages_N[batch.loss_mask_N].std(correction=0).item())
        record("learner/train_mask_share", train_mask_N.sum().item() / generated)
    record("learner/tokens", train_mask_N.sum().item())
    return StepTokens(batch=batch, train_mask_N=train_mask_N, advantages_N=advantages_N, proximal_N=batch.behaviour_N)


def _has_gradient(tokens: StepTokens, entropy_weight: float) -> Tensor:
    """[B] bool: whether a trajectory can contribute a gradient. Others stay in the denominators and are not computed.

    With an entropy bonus every token trained on can. An advantage that is not a number counts: its loss must be seen to be skipped.
    """
    counts = tokens.train_mask_N if entropy_weight else tokens.train_mask_N & ~(tokens.advantages_N.abs() <= NO_ADVANTAGE)
    return tokens.batch.count(counts) > 0


def _split(rows: int, mini_batches: int, ppo_epochs: int, *, seed: int) -> list[list[int]]:
    """The rows of each update: every epoch deals all rows anew, in an order that depends on the seed alone."""
    updates: list[list[int]] = []
    for epoch in range(ppo_epochs):
        order = list(range(rows))
        random.Random(mix(seed, epoch)).shuffle(order)
        updates += [sorted(order[start::mini_batches]) for start in range(min(mini_batches, rows))]
    return updates


def _pack_useful(batch: TrainingBatch, rows: list[int], useful_B: Tensor, budget: int, ranks: Ranks) -> MicroBatches:
    """This rank's micro-batches of those rows that have a gradient."""
    lengths, useful = batch.lengths_B.tolist(), useful_B.tolist()
    return pack([row for row in rows if useful[row]], lengths, budget=budget, ranks=ranks.size)[ranks.rank]


@torch.no_grad()
def _with_proximal(state: LearnerState, tokens: StepTokens, useful_B: Tensor, budget: int) -> StepTokens:
    """The tokens with the learner's log-probs before the first update. Each rank computes its rows; their sum is everybody's."""
    batch, device = tokens.batch, state.ranks.device
    proximal_N = torch.zeros_like(batch.behaviour_N)
    for rows in _pack_useful(batch, list(range(len(batch.trajectories))), useful_B, budget, state.ranks):
        micro = tokens.micro_batch(rows, device)
        logp_RT, _ = state.policy(micro.token_ids_RT, micro.loss_mask_RT, micro.temperature_R)
        for row, logp_T in zip(rows, logp_RT.cpu(), strict=False):
            start, length = int(batch.starts_B[row]), int(batch.lengths_B[row])
            proximal_N[start : start + length] = logp_T[:length]
    return replace(tokens, proximal_N=state.ranks.sum(proximal_N))


def _policy_loss(
    logp_RT: Tensor, micro: MicroBatch, algorithm: AlgorithmRecipe, denominator: Tensor, *, one_update: bool
) -> tuple[Tensor, LossStats]:
    """The recipe's loss. With one update in the step the proximal policy is the current one, so no pass is spent on it."""
    low, high = algorithm.loss.clip_low or 0.2, algorithm.loss.clip_high or 0.2
    if algorithm.proximal == "behaviour":
        two = (logp_RT, micro.behaviour_RT, micro.advantages_RT, micro.train_mask_RT)
        return clipped_policy_loss(*two, clip_low=low, clip_high=high, denominator=denominator)
    proximal_RT = logp_RT.detach() if one_update else micro.proximal_RT
    three = (logp_RT, proximal_RT, micro.behaviour_RT, micro.advantages_RT, micro.train_mask_RT)
    truncate = algorithm.importance.truncate or 2.0
    return decoupled_policy_loss(*three, clip_low=low, clip_high=high, truncate=truncate, denominator=denominator)
