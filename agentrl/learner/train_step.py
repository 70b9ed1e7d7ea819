"""One training step, top to bottom. B trajectories of a batch, N its tokens, R x T a micro-batch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from agentrl.algorithm.aggregation import Denominators, aggregate
from agentrl.algorithm.schedules import entropy_coefficient, learning_rate
from agentrl.algorithm.value_loss import value_losses
from agentrl.config.recipe import CriticRecipe, Recipe
from agentrl.learner.batch import MicroBatch, StepTokens, TrainingBatch
from agentrl.learner.memory import Cut, within_memory
from agentrl.learner.objective import Objective
from agentrl.learner.optimizer import apply_gradients
from agentrl.learner.prepare import prepare
from agentrl.learner.state import LearnerState
from agentrl.learner.tally import CriticTally, PolicyTally
from agentrl.record import phase, record, span
from agentrl.seeds import mix

__all__ = ["Updates", "train_step"]

CRITIC = 1 << 32  # apart from the numbers of the policy's updates: the critic's order of rows is its own


@dataclass(frozen=True, kw_only=True, slots=True)
class Updates:
    """For each update of a step whether it was done, or skipped because its loss or gradient norm was not finite."""

    policy: tuple[bool, ...]  # none while the critic is trained alone
    critic: tuple[bool, ...]

    @property
    def decisive(self) -> tuple[bool, ...]:
        """Those that say whether the batch was trained on: the policy's; the critic's where it is trained alone."""
        return self.policy or self.critic


def train_step(state: LearnerState, batch: TrainingBatch, recipe: Recipe, *, step: int, progress: float) -> Updates:
    """One batch, start to end: what there is to know before the first update, the critic's updates, the policy's.

    Every rank holds the whole batch and makes the same plan; it passes its own micro-batches through the models. Denominators count the
    whole update, over all ranks; FSDP averages gradients over ranks, hence `loss * size`.
    """
    learner, algorithm = recipe.learner, recipe.algorithm
    alone = 0 if recipe.critic is None else recipe.critic.warmup_steps  # steps in which the critic is trained alone
    entropy_weight = entropy_coefficient(algorithm.entropy.coefficient, schedule=algorithm.entropy.schedule, progress=progress)
    with phase("prepare"):
        prepared = prepare(state, batch, recipe, step=step, entropy_coefficient=entropy_weight, critic_alone=step < alone)
    critic_done = () if recipe.critic is None else _train_critic(state, prepared.tokens, recipe, recipe.critic, step=step, progress=progress)
    if step < alone:
        return Updates(policy=(), critic=critic_done)
    rate = _rate(state, learner.learning_rate, learner.schedule.model_dump(), step=step - alone, progress=progress)
    record("learner/learning_rate", rate)
    record("learner/entropy_coefficient", entropy_weight)
    objective = Objective.of(algorithm, entropy_coefficient=entropy_weight, mean_weight=prepared.mean_weight)
    useful = prepared.useful_B.tolist()
    policy_done: list[bool] = []
    updates = _split(len(batch.trajectories), learner.mini_batches, learner.ppo_epochs, seed=mix(recipe.seed, step))
    for number, rows in enumerate(updates):
        with phase("update"):
            tokens = _select(prepared.tokens, objective, rows, seed=mix(recipe.seed, step, number))
            tally = _policy_gradients(state, tokens, objective, rows, [row for row in rows if useful[row]], recipe, step=step)
            policy_done.append(apply_gradients(state.optimizer, loss=tally.loss, learning_rate=rate, max_grad_norm=learner.max_grad_norm))
            if policy_done[-1]:
                weighted = algorithm.proximal != "behaviour" or not objective.method.ratio
                tally.record_update(weighted=weighted, rejects=bool(algorithm.rejection), reference=algorithm.kl.where != "none")
            if policy_done == [True]:
                tally.record_gap()
    return Updates(policy=tuple(policy_done), critic=critic_done)


def _split(rows: int, mini_batches: int, epochs: int, *, seed: int) -> list[list[int]]:
    """The rows of each update: every epoch deals all rows anew, in an order that depends on the seed alone."""
    updates: list[list[int]] = []
    for epoch in range(epochs):
        order = list(range(rows))
        random.Random(mix(seed, epoch)).shuffle(order)
        updates += [sorted(order[start::mini_batches]) for start in range(min(mini_batches, rows))]
    return updates


def _policy_gradients(
    state: LearnerState, tokens: StepTokens, objective: Objective, rows: Sequence[int], useful: Sequence[int], recipe: Recipe, *, step: int
) -> PolicyTally:
    """The gradients of one update: of the rows that can have one, divided by the counts of all."""
    ranks, batch = state.ranks, tokens.batch
    tokens_B = batch.count(batch.loss_mask_N)[rows]

    def work(cut: Cut) -> PolicyTally:
        tally = PolicyTally(ranks)
        micro_batches = cut.micro_batches(batch, useful, ranks)
        for index, micro_rows in enumerate(micro_batches):
            state.policy.sync_gradients(index == len(micro_batches) - 1)
            micro = tokens.micro_batch(micro_rows, ranks.device)
            with span("forward"):
                logp_RT, entropy_RT = state.policy(micro.token_ids_RT, micro.loss_mask_RT, micro.temperature_R)
            terms = objective(logp_RT, entropy_RT, micro, _denominators(tokens_B, micro, recipe.algorithm.aggregation_horizon))
            with span("backward"):
                torch.autograd.backward(terms.loss * ranks.size)
            tally.add(terms, logp_RT, entropy_RT, micro)
        tally.reduce()
        return tally

    state.work.passed(state.policy.shape, batch, useful, batch.loss_mask_N, backward=True)
    longest = int(batch.lengths_B[list(rows)].max())
    cut = Cut.of(recipe.learner, packed=state.policy.packed)
    return within_memory(work, cut, models=[state.policy], ranks=ranks, step=step, longest=longest)


def _train_critic(state: LearnerState, tokens: StepTokens, recipe: Recipe, critic: CriticRecipe, *, step: int, progress: float) -> tuple[bool, ...]:
    """The critic's updates. It learns from every trajectory, whatever the policy's loss makes of it."""
    learner = recipe.learner
    assert state.critic_optimizer is not None
    rate = _rate(state, critic.learning_rate, critic.schedule.model_dump(), step=step, progress=progress)
    record("critic/learning_rate", rate)
    done: list[bool] = []
    mini_batches, epochs = critic.mini_batches or learner.mini_batches, critic.ppo_epochs or learner.ppo_epochs
    for rows in _split(len(tokens.batch.trajectories), mini_batches, epochs, seed=mix(recipe.seed, step, CRITIC)):
        with phase("critic"):
            tally = _critic_gradients(state, tokens, rows, recipe, critic.clip, step=step)
            clip = critic.max_grad_norm
            done.append(apply_gradients(state.critic_optimizer, loss=tally.loss, learning_rate=rate, max_grad_norm=clip, prefix="critic"))
            if done[-1]:
                tally.record_update()
    return tuple(done)


def _critic_gradients(state: LearnerState, tokens: StepTokens, rows: Sequence[int], recipe: Recipe, clip: float | None, *, step: int) -> CriticTally:
    ranks, batch, critic = state.ranks, tokens.batch, state.critic
    assert critic is not None
    tokens_B = batch.count(tokens.critic_mask_N)[list(rows)]

    def work(cut: Cut) -> CriticTally:
        tally = CriticTally(ranks)
        micro_batches = cut.micro_batches(batch, rows, ranks)
        for index, micro_rows in enumerate(micro_batches):
            critic.sync_gradients(index == len(micro_batches) - 1)
            micro = tokens.micro_batch(micro_rows, ranks.device)
            values_RT = critic(micro.token_ids_RT, micro.critic_mask_RT)
            losses_RT, clipped_RT = value_losses(values_RT, micro.values_RT, micro.returns_RT, clip=clip)
            loss = aggregate(losses_RT, micro.critic_mask_RT, how="token_mean", denominators=_denominators(tokens_B, micro, None))
            torch.autograd.backward(loss * ranks.size)
            tally.add(loss, clipped_RT, micro)
        tally.reduce()
        return tally

    state.work.passed(critic.shape, batch, rows, tokens.critic_mask_N, backward=True)
    longest = int(batch.lengths_B[list(rows)].max())
    cut = Cut.of(recipe.learner, packed=state.policy.packed)
    return within_memory(work, cut, models=[critic], ranks=ranks, step=step, longest=longest)


def _denominators(tokens_B: Tensor, micro: MicroBatch, horizon: float | None) -> Denominators:
    """Counts of the update, `tokens_B` being the generated tokens of each of its rows."""
    device = micro.tokens_R.device
    total, sequences = tokens_B.sum().to(device), (tokens_B > 0).sum().to(device)
    return Denominators(tokens=total, sequences=sequences, row_tokens_B=micro.tokens_R, horizon=horizon)


def _select(tokens: StepTokens, objective: Objective, rows: Sequence[int], *, seed: int) -> StepTokens:
    """With the tokens the loss singles out in this update, where it does that."""
    if objective.bound.select is None:
        return tokens
    batch = tokens.batch
    chosen_N = batch.spread(torch.zeros(len(batch.trajectories), dtype=torch.bool).index_fill(0, torch.tensor(rows), True))
    old_N = tokens.proximal_N if objective.algorithm.proximal == "recompute" else tokens.behaviour_N  # `interpolate` has no other before the pass
    mask_N = tokens.train_mask_N & chosen_N
    selected_N = objective.bound.select(old_N[None], tokens.advantages_N[None], mask_N[None], seed=seed)[0]
    return replace(tokens, selected_N=selected_N)


def _rate(state: LearnerState, peak: float, schedule: dict[str, float], *, step: int, progress: float) -> float:
    scale = state.controllers.learning_rate_scale
    return scale * learning_rate(peak, **schedule, step=step, progress=progress)  # type: ignore[arg-type]
