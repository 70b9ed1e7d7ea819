"""The algorithm, written down: a deterministic run, processes and all, is bit for bit the plain loop of this file.

    for each step:   play G tasks n times each  ->  advantages within each group  ->  one clipped update  ->  the new weights play

The loop has no HTTP, no processes, no concurrency: one episode at a time, always in slot 0. It is made of the same pure functions, and of the
engine's and the learner's models. The run computes the same numbers with episodes side by side in any slot, in any order of arrival.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import trio
from running import TINY, finish, output, records, start
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from agentrl.algorithm.advantages import AdvantageInputs, estimate
from agentrl.algorithm.aggregation import Denominators, aggregate
from agentrl.algorithm.losses import LossInputs, ppo
from agentrl.algorithm.packing import pack
from agentrl.algorithm.schedules import entropy_coefficient, learning_rate
from agentrl.buffer.records import BatchTaken, TrajectoryAdded
from agentrl.config.recipe import Recipe
from agentrl.data.order import TaskOrder
from agentrl.data.sources import load_tasks
from agentrl.engine.architecture import ModelConfig
from agentrl.engine.runner import Chunk, ModelRunner
from agentrl.engine.sampling import sample
from agentrl.engine.weights import Weights
from agentrl.env import Environment
from agentrl.learner.policy import PolicyModel
from agentrl.rollout.completion import first_stop
from agentrl.rollout.tokens import TokenEncoder
from agentrl.seeds import counter_uniform, sample_seed, turn_seed
from agentrl.system.prepare import with_prepared
from agentrl.types import Purpose, Task, Trajectory
from agentrl.wire import decode_trajectory
from envs.search import SearchEnv
from retriever.client import Passage
from retriever.corpus import read_corpus
from retriever.index import Index, Serving
from retriever.query import Query

pytestmark = pytest.mark.slow

DETERMINISTIC = TINY.with_name("deterministic.yaml")


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, Path]:
    """Two runs of one recipe, side by side, each with everything made anew."""
    run_dirs = tmp_path_factory.mktemp("first") / "run", tmp_path_factory.mktemp("second") / "run"
    for process, run_dir in [(start(run_dir, flags=[str(DETERMINISTIC)], own_cache=True), run_dir) for run_dir in run_dirs]:
        assert finish(process, run_dir) == 0, output(run_dir)
    return run_dirs


def test_a_deterministic_run_is_the_plain_loop_bit_for_bit(runs):
    run_dir, _ = runs
    recipe, model_dir = what_was_run(run_dir)
    batches = trained_batches(run_dir)
    assert len(batches) == recipe.run.steps == 3
    before = load_file(model_dir / "model.safetensors")
    for step, (episodes, weights) in enumerate(plain_run(recipe, model_dir)):
        assert_same_episodes(batches[step], episodes, version=step)
        published = load_file(run_dir / "weights" / f"v{step + 1}" / "model.safetensors")
        assert published.keys() == weights.keys()
        assert [name for name in weights if not torch.equal(published[name], weights[name])] == []
        assert not any(torch.equal(before[name], weights[name]) for name in weights)  # ... and all of them have moved
        before = published


def test_the_run_has_what_the_comparison_is_about(runs):
    trajectories = [trajectory for batch in trained_batches(runs[0]) for trajectory in batch]
    assert sum(len(turn.tool_calls) for trajectory in trajectories for turn in trajectory.turns) >= 10
    assert any(turn.action == "invalid" for trajectory in trajectories for turn in trajectory.turns)
    rewards = [{t.reward.total for t in trajectories if t.ticket.ordinal == ordinal} for ordinal in {t.ticket.ordinal for t in trajectories}]
    assert sum(earned == {0.0, 1.0} for earned in rewards) >= 3  # groups with advantages


def test_a_second_run_from_nothing_gives_the_same_bits(runs):
    for mine, other in zip(*map(trained_batches, runs), strict=True):
        assert [trajectory.ticket for trajectory in mine] == [trajectory.ticket for trajectory in other]
        for one, two in zip(mine, other, strict=True):
            assert one.token_ids.tobytes() == two.token_ids.tobytes()
            assert one.behaviour_logprobs.tobytes() == two.behaviour_logprobs.tobytes()


@dataclass(kw_only=True)
class Episode:
    """What one episode left: tokens, which of them the policy wrote, their log-probs as sampled, what it earned."""

    token_ids: list[int]
    mask: list[int]
    logprobs: list[float]
    reward: float = 0.0

    def say(self, token_ids: Sequence[int]) -> None:
        """Tokens the policy did not write."""
        self.token_ids += token_ids
        self.mask += [0] * len(token_ids)
        self.logprobs += [0.0] * len(token_ids)

    def write(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Tokens it wrote."""
        self.token_ids += token_ids
        self.mask += [1] * len(token_ids)
        self.logprobs += logprobs


def plain_run(recipe: Recipe, model_dir: Path) -> Iterator[tuple[list[Episode], dict[str, Tensor]]]:
    """Of every step the episodes, and the weights after it."""
    torch.set_num_threads(1)
    size, n = recipe.learner.groups_per_batch, recipe.rollout.group_size
    order = TaskOrder(load_tasks(recipe.tasks.train, seed=recipe.seed), recipe.tasks.train, seed=recipe.seed)
    player = Player(recipe, model_dir)
    policy = PolicyModel.load(model_dir)
    optimizer = torch.optim.AdamW(policy.parameters(), betas=recipe.learner.betas, weight_decay=recipe.learner.weight_decay, fused=True)
    for step in range(recipe.run.steps):
        samples = [(ordinal, k) for ordinal in range(step * size, (step + 1) * size) for k in range(n)]
        seeds = [sample_seed(recipe.seed, Purpose.TRAIN, ordinal, k) for ordinal, k in samples]
        episodes = [trio.run(player.play, order.task(ordinal), seed) for (ordinal, _), seed in zip(samples, seeds, strict=True)]
        update(policy, optimizer, episodes, recipe, step)
        weights = {name: parameter.detach().clone() for name, parameter in policy.named_weights()}
        player.runner.weights.replace(weights)
        yield episodes, weights


def update(policy: PolicyModel, optimizer: torch.optim.AdamW, episodes: list[Episode], recipe: Recipe, step: int) -> None:
    """One step of group-relative, clipped policy optimisation with an entropy bonus, on tokens the policy wrote."""
    learner, algorithm, progress = recipe.learner, recipe.algorithm, step / recipe.run.steps
    entropy_weight = entropy_coefficient(algorithm.entropy.coefficient, schedule=algorithm.entropy.schedule, progress=progress)
    rewards_B = torch.tensor([episode.reward for episode in episodes], dtype=torch.float64)
    groups_B = torch.arange(len(episodes)) // recipe.rollout.group_size
    earned = AdvantageInputs(rewards_BT=rewards_B[:, None], mask_BT=torch.ones(len(episodes), 1, dtype=torch.bool), groups_B=groups_B)
    advantages_B1 = estimate("grpo", earned, gamma=1.0, lam=1.0, whiten=None, options={}).advantages_BT.float()
    generated = torch.tensor(sum(sum(episode.mask) for episode in episodes))
    lengths = [len(episode.token_ids) for episode in episodes]
    [micro_batches] = pack(range(len(episodes)), lengths, budget=learner.tokens_per_micro_batch, ranks=1)
    assert len(micro_batches) >= 2
    for rows in micro_batches:
        ids_RT, mask_RT, behaviour_RT = (
            pad_sequence([torch.tensor(getattr(episodes[row], name)) for row in rows], batch_first=True) for name in ("token_ids", "mask", "logprobs")
        )
        temperature_R = torch.full((len(rows),), recipe.rollout.temperature)
        logp_RT, entropy_RT = policy(ids_RT, mask_RT == 1, temperature_R)
        inputs = {"advantages_BT": advantages_B1[list(rows)].expand_as(logp_RT), "mask_BT": mask_RT.float(), "weights_BT": torch.ones_like(logp_RT)}
        losses_RT = ppo(LossInputs(logp_BT=logp_RT, old_BT=behaviour_RT, **inputs), **algorithm.loss.arguments).values_BT
        by = Denominators(tokens=generated, sequences=torch.tensor(len(episodes)), row_tokens_B=mask_RT.sum(1))
        loss = aggregate(losses_RT, mask_RT, how="token_mean", denominators=by)
        torch.autograd.backward(loss - entropy_weight * aggregate(entropy_RT, mask_RT, how="token_mean", denominators=by))
    torch.nn.utils.clip_grad_norm_(policy.parameters(), learner.max_grad_norm)
    optimizer.param_groups[0]["lr"] = learning_rate(learner.learning_rate, **learner.schedule.model_dump(), step=step, progress=progress)
    optimizer.step()
    optimizer.zero_grad()


class Player:
    """Plays one episode at a time."""

    def __init__(self, recipe: Recipe, model_dir: Path) -> None:
        config = ModelConfig.load(model_dir)
        self.runner = ModelRunner(Weights.load(model_dir, config), slots=recipe.engine.slots, context_tokens=recipe.engine.context_tokens)
        self._eos = config.eos_ids
        self._encoder = TokenEncoder.load(model_dir)
        self._limits = recipe.rollout.limits
        self._temperature = torch.tensor([recipe.rollout.temperature])
        self._options = recipe.env.options
        self._library = Library(Path(recipe.retriever.corpus))

    async def play(self, task: Task, seed: int) -> Episode:
        """Turn by turn: the policy writes, the environment answers, until one of them ends it or the context is full."""
        env: Environment = SearchEnv(retriever=self._library, **self._options)
        episode = Episode(token_ids=[], mask=[], logprobs=[])
        episode.say(self._encoder.encode_start(await env.start(task)).ids.tolist())
        for turn in itertools.count():
            room = self._limits.context_tokens - len(episode.token_ids)
            budget = min(self._limits.completion_tokens, room)
            tokens, logprobs, text = self._write(episode.token_ids, turn_seed(seed, turn), env.stop_strings, budget)
            episode.write(tokens, logprobs)
            answer = await env.step(text)
            episode.reward += sum(answer.parts.values())
            if answer.observation is None or (len(tokens) == room and not text.endswith(tuple(env.stop_strings))):
                return episode
            observation = self._encoder.encode_observation(answer.observation, self._limits.observation_tokens, after=tokens[-1])
            if not observation.fits or len(episode.token_ids) + len(observation.ids) >= self._limits.context_tokens:
                return episode
            episode.say(observation.ids.tolist())
        raise AssertionError("unreachable")

    def _write(self, context: list[int], seed: int, stops: Sequence[str], budget: int) -> tuple[list[int], list[float], str]:
        """One completion: the whole context through the model, then token after token, in slot 0 of a cache whose other rows are idle."""
        runner = self.runner
        width = runner.context_tokens
        padded = context + [0] * (width - len(context))
        hidden = runner.prefill([Chunk(slot=0, tokens=padded)], attend=width, every_token=True)
        logits = runner.logits(hidden[[len(context) - 1]])
        tokens, logprobs = [], []
        inputs, positions = torch.zeros(runner.slots, dtype=torch.long), torch.full((runner.slots,), runner.idle_position)
        while True:
            uniform = torch.tensor([counter_uniform(seed, len(tokens))], dtype=torch.float64)
            token, logprob = sample(logits[:1], self._temperature, uniform)
            tokens.append(token.item())
            logprobs.append(logprob.item())
            text = self._encoder.decode(np.array(tokens))
            stopped = first_stop(text, stops)
            if stopped is not None or tokens[-1] in self._eos or len(tokens) == budget:
                return tokens, logprobs, text if stopped is None else stopped[1]
            inputs[0], positions[0] = tokens[-1], len(context) + len(tokens) - 1
            logits = runner.decode(inputs, positions, attend=width)


class Library:
    """The retriever without its server: one query at a time over the same corpus."""

    def __init__(self, corpus: Path) -> None:
        self._index = Index.of(read_corpus(corpus), serving=Serving(one_at_a_time=True))

    async def retrieve(self, queries: Sequence[str], *, topk: int, deadline_s: float | None = None) -> list[list[Passage]]:
        found = self._index.search([Query(text=query, topk=topk) for query in queries])
        documents = [[json.loads(self._index.documents[hit.row]) for hit in hits] for hits in found]
        return [[Passage(id=each["id"], contents=each["contents"]) for each in some] for some in documents]


def what_was_run(run_dir: Path) -> tuple[Recipe, Path]:
    """Its recipe with the prepared files in place, and the model it started from."""
    cache = run_dir.parent / ".cache"
    [prepared], [model_dir] = (cache / "prepared").iterdir(), (cache / "warm").iterdir()
    return with_prepared(Recipe.model_validate(json.loads((run_dir / "run.json").read_text())["recipe"]), prepared), model_dir


def trained_batches(run_dir: Path) -> list[list[Trajectory]]:
    """The trajectories of each batch, as the journal has them, by (ordinal, k)."""
    found = [decode_trajectory(record.data) for record in records(run_dir) if isinstance(record, TrajectoryAdded)]
    by_sample = {trajectory.ticket.sample: trajectory for trajectory in found}
    taken = [[ordinal for ordinal, _, _ in record.groups] for record in records(run_dir) if isinstance(record, BatchTaken)]
    return [[by_sample[sample] for sample in sorted(by_sample) if sample[0] in ordinals] for ordinals in taken]


def assert_same_episodes(trajectories: list[Trajectory], episodes: list[Episode], *, version: int) -> None:
    for trajectory, episode in zip(trajectories, episodes, strict=True):
        assert trajectory.token_ids.tolist() == episode.token_ids, trajectory.ticket.name
        assert trajectory.loss_mask.tolist() == episode.mask
        assert np.array_equal(trajectory.behaviour_logprobs, np.array(episode.logprobs, dtype=np.float32)), trajectory.ticket.name
        assert set(trajectory.versions[trajectory.loss_mask == 1].tolist()) == {version}
        assert trajectory.reward.total == episode.reward
