"""Reinforcement learning of a search agent, whole, in one file and one process. No Ray, no servers, no asynchrony.

    python examples/one_file_loop.py [--seconds 120] [--seed 0] [--threads 1]

    play        24 questions x 16 episodes: the policy thinks, searches, reads and answers; the reward is 1 for the right answer, else 0
    advantages  how much better an episode did than the other 15 of its question (GRPO)
    update      PPO's clipped ratio current / behaviour, over the tokens that the policy wrote itself and no others

This is what `agentrl run recipes/quickstart.yaml` does with many processes, made of the same parts: its world, its environment and
retriever, the embedded engine, the episode loop, the formulas of `agentrl.algorithm`. What is missing is what makes it hard: episodes that
go on while the weights change, machines that die, models that do not fit.

The policy starts from the recipe's warm start, which is made first (about a minute and a half) and kept in runs/.cache, where `agentrl run`
finds it as well; `--seconds` counts from there. Expect held-out exact match to rise from about .4 to .9 within half a minute.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
import trio
from torch import Tensor
from trio.testing import wait_all_tasks_blocked

from agentrl.algorithm.advantages import AdvantageInputs, estimate
from agentrl.algorithm.aggregation import Denominators, aggregate
from agentrl.algorithm.losses import LossInputs, ppo
from agentrl.algorithm.packing import pack
from agentrl.config.load import load_recipe
from agentrl.config.recipe import Recipe
from agentrl.data.sources import load_tasks
from agentrl.engine.architecture import ModelConfig
from agentrl.engine.request import GenerateRequest, SamplingParams
from agentrl.engine.runner import ModelRunner
from agentrl.engine.scheduler import Scheduler
from agentrl.engine.sequence import Sequence as Generation
from agentrl.engine.stops import TokenText
from agentrl.engine.weights import Weights
from agentrl.learner.policy import PolicyModel
from agentrl.rollout.builder import Assignment
from agentrl.rollout.completion import EOS, LENGTH, Completion, first_stop
from agentrl.rollout.episode import run_episode
from agentrl.rollout.limits import Limits
from agentrl.rollout.tokens import TokenEncoder, Tokens
from agentrl.seeds import mix, turn_seed
from agentrl.system.prepare import prepare
from agentrl.types import Purpose, Task, Ticket, Trajectory
from envs.search import SearchEnv
from retriever.building.load import load as load_index
from retriever.client import Passage
from retriever.query import Query

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "recipes" / "quickstart.yaml"
QUESTIONS, EPISODES = 24, 16  # per update, and per question
SLOTS = 384  # sequences generated at once
LEARNING_RATE, FINAL_SHARE, BETAS, MAX_GRAD_NORM = 2e-3, 0.1, (0.9, 0.98), 1.0
CLIP, ENTROPY = 0.2, 0.01
TOKENS_PER_MICRO_BATCH = 4096  # padded: what a CPU's cache likes
EVALUATE_EVERY_S = 10.0


def main() -> None:
    """Warm-start, then play and update until the time is up."""
    options = parse()
    torch.set_num_threads(options.threads)
    recipe, model_dir = prepared(options.seed, options.overrides)
    train, heldout = load_tasks(recipe.tasks.train, seed=options.seed), load_tasks(recipe.eval.sets["heldout"].tasks, seed=options.seed)
    player = Player(model_dir, recipe)
    policy = PolicyModel.load(model_dir)
    optimizer = torch.optim.AdamW(policy.parameters(), betas=BETAS, weight_decay=0.0, fused=True)
    chosen, rewards, step, started_s, evaluated_s = random.Random(options.seed), list[float](), 0, time.monotonic(), -EVALUATE_EVERY_S
    print(f"{'seconds':>8} {'updates':>8} {'reward':>8} {'EM':>8}   EM: {len(heldout)} held-out questions, greedy", flush=True)
    while True:
        seconds = time.monotonic() - started_s
        over = seconds >= options.seconds
        if over or seconds >= evaluated_s + EVALUATE_EVERY_S:
            reward = f"{np.mean(rewards):.3f}" if rewards else ""
            print(f"{seconds:8.1f} {step:8} {reward:>8} {exact_match(player, heldout):8.3f}", flush=True)
            rewards, evaluated_s = [], seconds
        if over:
            return
        questions = chosen.sample(train, QUESTIONS)
        episodes = player.play([task for task in questions for _ in range(EPISODES)], temperature=1.0, seed=mix(options.seed, step))
        update(policy, optimizer, episodes, progress=seconds / options.seconds)
        step += 1
        player.load(dict(policy.named_weights()), version=step)
        rewards.append(mean_reward(episodes))


def update(policy: PolicyModel, optimizer: torch.optim.Optimizer, episodes: Sequence[Trajectory], *, progress: float) -> None:
    """One step of GRPO with two-policy PPO. B episodes, T tokens of the longest one; R of them are a micro-batch."""
    mask_BT = padded([episode.loss_mask for episode in episodes]).bool()  # what the policy wrote: no prompt, no passage
    token_ids_BT = padded([episode.token_ids for episode in episodes]).long()
    behaviour_BT = padded([episode.behaviour_logprobs for episode in episodes])
    rewards_BT = torch.zeros(mask_BT.shape, dtype=torch.float64)
    for row, episode in enumerate(episodes):
        rewards_BT[row, list(episode.reward.tokens)] = torch.tensor(episode.reward.amounts, dtype=torch.float64)
    groups_B = torch.arange(len(episodes)) // EPISODES
    inputs = AdvantageInputs(rewards_BT=rewards_BT, mask_BT=mask_BT, groups_B=groups_B)
    advantages_BT = estimate("grpo", inputs, gamma=1.0, lam=1.0, whiten=None, options={}).advantages_BT.float()

    denominators = Denominators.of(mask_BT)  # of the whole update: how it is cut into micro-batches changes nothing
    bonus = ENTROPY * (1 - progress)
    [micro_batches] = pack(range(len(episodes)), [len(episode) for episode in episodes], budget=TOKENS_PER_MICRO_BATCH, ranks=1)
    for rows in micro_batches:
        rows_R, longest = torch.tensor(rows), max(len(episodes[row]) for row in rows)
        part = rows_R, slice(longest)
        logp_RT, entropy_RT = policy(token_ids_BT[part], mask_BT[part], torch.ones(len(rows)))
        tokens = LossInputs(
            logp_BT=logp_RT,
            old_BT=behaviour_BT[part],
            advantages_BT=advantages_BT[part],
            mask_BT=mask_BT[part].float(),
            weights_BT=torch.ones_like(logp_RT),  # the ratio current / behaviour is the importance weight already
        )
        losses_RT = ppo(tokens, clip_low=CLIP, clip_high=CLIP).values_BT
        mean = partial(aggregate, mask_BT=mask_BT[part], how="token_mean", denominators=denominators.rows(rows_R))
        torch.autograd.backward(mean(losses_RT) - bonus * mean(entropy_RT))
    torch.nn.utils.clip_grad_norm_(policy.parameters(), MAX_GRAD_NORM)
    optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - (1 - FINAL_SHARE) * progress)
    optimizer.step()
    optimizer.zero_grad()


class Player:
    """Plays many episodes at once. Each is the production loop in a task of its own; the engine writes the turns of all of them together."""

    def __init__(self, model_dir: Path, recipe: Recipe) -> None:
        config = ModelConfig.load(model_dir)
        text = TokenText.load(model_dir, config.vocabulary)
        assert text is not None, f"{model_dir} has no tokenizer"
        self._text, self.end_ids, self.tokens = text, config.eos_ids, TokenEncoder.load(model_dir)
        self._limits = Limits.of(recipe.rollout.limits)
        runner = ModelRunner(Weights.load(model_dir, config), slots=SLOTS, context_tokens=self._limits.context_tokens)
        self._engine = Scheduler(runner, text, version="0")
        self._writing: dict[str, trio.Event] = {}  # turns the engine has not finished, by request id
        assert recipe.retriever is not None
        assert recipe.retriever.corpus is not None
        self._environment = partial(SearchEnv, retriever=LocalRetriever(Path(recipe.retriever.corpus)), **recipe.env.options)

    def load(self, weights: Mapping[str, Tensor], *, version: int) -> None:
        """Generate with these weights from now on."""
        self._engine.commit(weights, str(version))

    def play(self, tasks: Sequence[Task], *, temperature: float, seed: int) -> list[Trajectory]:
        """One episode of each task, in their order."""
        return trio.run(self._play, tasks, temperature, seed)

    async def _play(self, tasks: Sequence[Task], temperature: float, seed: int) -> list[Trajectory]:
        played: dict[int, Trajectory] = {}

        async def one(number: int, task: Task) -> None:
            ticket = Ticket(purpose=Purpose.TRAIN, ordinal=number, k=0, attempt=0)
            asked = Assignment(ticket=ticket, task=task, seed=mix(seed, number), temperature=temperature)
            played[number] = await run_episode(self._environment(), asked, Turns(self, asked), self.tokens, self._limits)

        async with trio.open_nursery() as episodes:
            for number, task in enumerate(tasks):
                episodes.start_soon(one, number, task)
            while len(played) < len(tasks):
                await wait_all_tasks_blocked()  # until every episode waits for its turn, or has ended
                self._engine.step()
                for generation in self._engine.take_finished():
                    self._writing.pop(generation.request.rid).set()
        return [played[number] for number in range(len(tasks))]

    async def write(self, request: GenerateRequest) -> Generation:
        """Wait until the engine has written a turn."""
        generation, written = Generation.of(request, self._text), trio.Event()
        self._writing[request.rid] = written
        self._engine.submit(generation)
        await written.wait()
        return generation


class Turns:
    """One episode's policy: the engine, asked for one turn after the other."""

    def __init__(self, player: Player, asked: Assignment) -> None:
        self._player, self._asked, self._turn = player, asked, 0

    async def complete(self, token_ids: Tokens, *, stop_strings: Sequence[str], budget: int) -> Completion:
        """Write the next turn."""
        params = SamplingParams(
            max_new_tokens=budget,
            temperature=self._asked.temperature,
            stop=tuple(stop_strings),
            stop_ids=self._player.end_ids,
            seed=turn_seed(self._asked.seed, self._turn),
        )
        rid, started_s = f"{self._asked.ticket.name}/{self._turn}", time.time()
        self._turn += 1
        written = await self._player.write(GenerateRequest(rid=rid, input_ids=token_ids.tolist(), params=params))
        text = self._player.tokens.decode(written.output)
        stop, text = first_stop(text, stop_strings) or (EOS if written.output[-1] in params.stop_ids else LENGTH, text)
        return Completion(
            token_ids=np.array(written.output, dtype=np.int32),
            logprobs=np.array(written.logprobs, dtype=np.float32),  # as sampled: the behaviour policy's
            versions=np.full(len(written.output), int(written.version), dtype=np.int32),
            text=text,
            stop=stop,
            engine="in this process",
            started_s=started_s,
            generated_s=time.time(),
        )


class LocalRetriever:
    """The retriever's index without its server."""

    def __init__(self, corpus: Path) -> None:
        index = load_index(corpus)
        documents = [json.loads(document) for document in index.documents]

        @cache  # the episodes of a group often ask the same
        def search(query: str, topk: int) -> list[Passage]:
            [hits] = index.search([Query(text=query, topk=topk)])
            return [Passage(id=documents[hit.row]["id"], contents=documents[hit.row]["contents"], score=hit.score) for hit in hits]

        self._search = search

    async def retrieve(self, queries: Sequence[str], *, topk: int, deadline_s: float | None = None) -> list[list[Passage]]:
        """At most `topk` passages per query, best first."""
        return [self._search(query, topk) for query in queries]


def padded(arrays: Sequence[np.ndarray]) -> Tensor:
    """[B, T]: rows of different lengths, filled up with zeros on the right."""
    return torch.nn.utils.rnn.pad_sequence([torch.from_numpy(array) for array in arrays], batch_first=True)


def mean_reward(episodes: Sequence[Trajectory]) -> float:
    """Share of right answers."""
    return float(np.mean([episode.reward.total for episode in episodes]))


def exact_match(player: Player, tasks: Sequence[Task]) -> float:
    """Share of questions answered right by the greedy policy."""
    return mean_reward(player.play(tasks, temperature=0.0, seed=0))


def prepared(seed: int, overrides: Sequence[str]) -> tuple[Recipe, Path]:
    """The recipe with its world made, and the warm-started model: from the cache where they are there."""
    recipe = load_recipe([RECIPE], [f"seed={seed}", f"run.dir={ROOT / 'runs'}", *overrides])

    def told(what: str, done: int, of: int) -> None:
        print(f"\rpreparing: {what:40} {done:5}/{of}", end="\n" if done == of else "", flush=True)

    return trio.run(partial(prepare, recipe, Path(recipe.run.dir) / "one_file_loop", python_path=str(ROOT), progress=told))


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0, help="of playing, updating and evaluating, after the warm start")
    parser.add_argument("--seed", type=int, default=0, help="of the world, the warm start and the episodes")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="of the recipe's world, model, warm start and limits")
    return parser.parse_args()


if __name__ == "__main__":
    main()
