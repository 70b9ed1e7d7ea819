"""The learner: its passes against a bare model's, its log-probs against materialised logits, its ranks against one another.

    python benchmarks/learner.py [--part passes|logprobs|balance] [--repeats 5]

passes    `Learner.train` on one rank against a plain loop over a transformers model: the same trajectories in the same micro-batches, forward,
          backward, clipped gradient, AdamW. The plain loop has no rewards, advantages, metrics or checks, and its log-probs are `log_softmax`
          of all logits; a second one computes logits of generated tokens only. Claim: at least 0.85 of the plain loops' tokens/s. Tokens
          are real ones, padding aside; runs are interleaved, the figure is the median of ratios of neighbouring runs. CPU seconds.
logprobs  `token_logprobs` against materialised logits, both with entropies, forward and backward at [T=4096, V=32000], hidden size 128, float32.
          Each run is a process of its own, whose growth of the peak resident set is the memory. Claim: at most 0.15 of the memory, not slower.
balance   Tokens of the fullest rank over the mean, as rows are dealt to 2, 4 and 8 ranks, for four distributions of lengths. Claim: at most 1.05.

One thread. A missed claim is printed as missed, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2Config

from agentrl.algorithm.packing import pack, rank_tokens
from agentrl.config.recipe import Recipe
from agentrl.learner.batch import StepTokens, TrainingBatch
from agentrl.learner.learner import Learner
from agentrl.learner.logprob import token_logprobs
from agentrl.learner.ranks import Ranks
from agentrl.types import Purpose, Reward, StopReason, Ticket, Trajectory

PASSES_CLAIM, MEMORY_CLAIM, BALANCE_CLAIM = 0.85, 0.15, 1.05
TOKENS, VOCABULARY, HIDDEN = 4096, 32000, 128  # of the log-probs
CLIP = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """A model and the trajectories that go through it."""

    name: str
    hidden: int
    layers: int
    heads: int
    vocabulary: int
    trajectories: int
    micro_batch_tokens: int
    searches: tuple[int, ...]  # of an episode, drawn from
    observation: tuple[int, int]  # tokens, at least and at most
    completion: tuple[int, int]


SCENES = (
    Scene(
        name="quick start",
        hidden=128,
        layers=2,
        heads=4,
        vocabulary=853,
        trajectories=384,
        micro_batch_tokens=4096,
        searches=(1, 1, 2, 2, 2, 3),
        observation=(36, 58),
        completion=(8, 20),
    ),
    Scene(
        name="long tail",
        hidden=256,
        layers=4,
        heads=4,
        vocabulary=4000,
        trajectories=32,
        micro_batch_tokens=4096,
        searches=(0, 1, 1, 1, 2, 2, 3, 4),
        observation=(60, 160),
        completion=(20, 120),
    ),
)


def main() -> int:
    """Measure, print; 1 where a claim is missed."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--part", choices=["passes", "logprobs", "balance"])
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--child", choices=["naive", "ours"], help=argparse.SUPPRESS)
    arguments = options.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    if arguments.child:
        print(*logprob_run(naive_logprobs if arguments.child == "naive" else token_logprobs))
        return 0
    parts: dict[str, Callable[[int], bool]] = {"passes": passes, "logprobs": logprobs, "balance": balance}
    print(f"{os.cpu_count()} x {platform.machine()}, one thread, Python {platform.python_version()}, torch {torch.__version__},", end=" ")
    print(f"transformers {transformers.__version__}, load {os.getloadavg()[0]:.1f}\n")
    kept = [part(arguments.repeats) for name, part in parts.items() if arguments.part in (None, name)]
    return 0 if all(kept) else 1


def passes(repeats: int) -> bool:
    """Learner against plain loops."""
    print("| passes | real tokens | learner tokens/s | plain loop | logits of generated tokens only | ratio | ratio | claim |\n|" + "---|" * 8)
    kept = True
    for scene in SCENES:
        with tempfile.TemporaryDirectory() as directory:
            ratios, rates, tokens = measured_passes(scene, Path(directory), repeats)
        told = f"| {scene.name} | {tokens:,} | {' | '.join(f'{rate:,.0f}' for rate in rates)} | {ratios[0]:.2f} | {ratios[1]:.2f} |"
        good = min(ratios) >= PASSES_CLAIM
        print(f"{told} {verdict(good, f'>= {PASSES_CLAIM}')} |")
        kept = kept and good
    print()
    return kept


def measured_passes(scene: Scene, directory: Path, repeats: int) -> tuple[list[float], list[float], int]:
    """Ratios to both plain loops, tokens a second of the learner and of both, tokens."""
    batch = TrainingBatch.of(episodes(scene), {0: 0})
    model_dir = write_model(scene, directory / "model")
    learner = Learner.build(recipe_of(scene), model_dir, Ranks.single(), directory)
    plain = [PlainLoop(scene, model_dir, batch, generated_only=generated_only) for generated_only in (False, True)]
    step = 0

    def train() -> None:
        nonlocal step
        learner.train(batch, step=step, progress=0.0)
        step += 1

    runs = [train, *(loop.train for loop in plain)]
    for run in runs:  # warm up
        run()
    seconds = [[cpu_seconds(run) for run in runs] for _ in range(repeats)]
    ratios = [statistics.median(row[index] / row[0] for row in seconds) for index in (1, 2)]
    tokens = int(batch.lengths_B.sum())
    return ratios, [tokens / statistics.median(row[index] for row in seconds) for index in range(3)], tokens


class PlainLoop:
    """Forward, backward and optimizer of a transformers model, and nothing else."""

    def __init__(self, scene: Scene, model_dir: Path, batch: TrainingBatch, *, generated_only: bool) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="sdpa").train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.generated_only = generated_only
        tokens = StepTokens.of(batch, critic_mask_N=batch.loss_mask_N, train_mask_N=batch.loss_mask_N)
        advantages = batch.rewards_B - batch.rewards_B.mean()
        lengths = batch.lengths_B.tolist()
        self.generated = batch.loss_mask_N.sum()
        [cut] = pack(range(len(lengths)), lengths, budget=scene.micro_batch_tokens, ranks=1)
        self.micro_batches = []
        for rows in cut:
            micro = tokens.micro_batch(rows, torch.device("cpu"))
            shift = (micro.token_ids_RT, micro.loss_mask_RT[:, 1:], micro.behaviour_RT[:, 1:], advantages[list(rows)].float()[:, None])
            self.micro_batches.append(shift)

    def train(self) -> None:
        """One update."""
        for token_ids_RT, mask_RS, old_RS, advantages_R1 in self.micro_batches:
            logp_N = self._logprobs(token_ids_RT, mask_RS)
            ratio_N, advantages_N = (logp_N - old_RS[mask_RS]).exp(), advantages_R1.expand(mask_RS.shape)[mask_RS]
            loss = -torch.minimum(ratio_N * advantages_N, ratio_N.clamp(1 - CLIP, 1 + CLIP) * advantages_N).sum() / self.generated
            torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _logprobs(self, token_ids_RT: Tensor, mask_RS: Tensor) -> Tensor:
        targets_N = token_ids_RT[:, 1:][mask_RS]
        if self.generated_only:
            hidden_RTH = self.model.model(input_ids=token_ids_RT, use_cache=False).last_hidden_state
            logits_NV = self.model.lm_head(hidden_RTH[:, :-1][mask_RS])
            return logits_NV.float().log_softmax(-1).gather(-1, targets_N[:, None])[:, 0]
        logits_RSV = self.model(input_ids=token_ids_RT, use_cache=False).logits[:, :-1]
        return logits_RSV.float().log_softmax(-1).gather(-1, token_ids_RT[:, 1:, None])[..., 0][mask_RS]


def logprobs(repeats: int) -> bool:
    """Memory and time of the log-prob function."""
    print(f"| log-probs and entropies, T={TOKENS}, V={VOCABULARY}, H={HIDDEN}, float32 | extra MiB | CPU s |\n|---|---|---|")
    runs: dict[str, list[tuple[float, float]]] = {"naive": [], "ours": []}
    for _ in range(repeats):
        for name, seen in runs.items():
            told = subprocess.run([sys.executable, __file__, "--child", name], capture_output=True, text=True, check=True).stdout.split()
            seen.append((float(told[0]), float(told[1])))
    for name, seen in runs.items():
        print(f"| {name} | {statistics.median(mib for mib, _ in seen):.0f} | {statistics.median(s for _, s in seen):.2f} |")
    pairs = list(zip(runs["ours"], runs["naive"], strict=True))
    memory, took = (statistics.median(ours[index] / naive[index] for ours, naive in pairs) for index in (0, 1))
    good = memory <= MEMORY_CLAIM and took <= 1.0
    print(f"| ours / naive | {memory:.3f} {verdict(memory <= MEMORY_CLAIM, f'<= {MEMORY_CLAIM}')} | {took:.2f} {verdict(took <= 1, '<= 1')} |\n")
    return good


def logprob_run(function: Callable[..., tuple[Tensor, ...]]) -> tuple[float, float]:
    """Growth of the peak resident set in MiB and CPU seconds of a forward and a backward pass, in this process."""
    torch.manual_seed(0)
    hidden_NH, weight_VH = torch.randn(TOKENS, HIDDEN), torch.randn(VOCABULARY, HIDDEN) * 0.05
    targets_N, temperature_N = torch.randint(VOCABULARY, (TOKENS,)), torch.ones(TOKENS)
    mix_2N = torch.randn(2, TOKENS)

    def run(tokens: int) -> None:
        inputs = hidden_NH[:tokens].clone().requires_grad_(), weight_VH.clone().requires_grad_()
        logp_N, entropy_N = function(*inputs, targets_N[:tokens], temperature_N[:tokens])
        torch.autograd.backward((logp_N * mix_2N[0, :tokens]).sum() + (entropy_N * mix_2N[1, :tokens]).sum())

    run(8)  # code pages, the autograd thread
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident_mib("VmRSS")
    took = cpu_seconds(lambda: run(TOKENS))
    return resident_mib("VmHWM") - before, took


def resident_mib(which: str) -> float:
    """Resident set of this process, now (VmRSS) or at its peak (VmHWM)."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(which)]
    return float(line.split()[1]) / 1024


def naive_logprobs(hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor, temperature_N: Tensor) -> tuple[Tensor, ...]:
    """With all logits in memory, as autograd has it."""
    logp_NV = (hidden_NH @ weight_VH.T / temperature_N[:, None]).log_softmax(-1)
    return logp_NV.gather(-1, targets_N[:, None])[:, 0], -(logp_NV.exp() * logp_NV).sum(-1)


def balance(_: int) -> bool:
    """The fullest rank over the mean."""
    print("| lengths | rows | 2 ranks | 4 ranks | 8 ranks | as the rows come, 8 ranks | claim |\n|" + "---|" * 7)
    kept = True
    for name, lengths in length_mixes().items():
        packed = {ranks: pack(range(len(lengths)), lengths, budget=16384, ranks=ranks) for ranks in (2, 4, 8)}
        loads = {ranks: rank_tokens(range(len(lengths)), lengths, dealt) for ranks, dealt in packed.items()}
        over = [loads[ranks][1].most * ranks / sum(lengths) for ranks in packed]
        good = max(over) <= BALANCE_CLAIM
        columns = " | ".join(f"{ratio:.4f}" for ratio in over)
        print(f"| {name} | {len(lengths)} | {columns} | {loads[8][0].most * 8 / sum(lengths):.3f} | {verdict(good, f'<= {BALANCE_CLAIM}')} |")
        kept = kept and good
    print()
    return kept


def length_mixes() -> dict[str, list[int]]:
    """Lengths of the rows of a batch."""
    source = random.Random(0)
    quickstart, tail = ([len(trajectory) for group in episodes(scene) for trajectory in group] for scene in SCENES)
    search = [min(4096, int(source.lognormvariate(7.2, 0.6))) for _ in range(512)]
    few = [min(4096, int(source.lognormvariate(7.2, 0.6))) for _ in range(64)]
    return {"quick start": quickstart, "long tail": tail, "log-normal, median 1,300, cut at 4,096": search, "the same, a mini-batch of 64": few}


def episodes(scene: Scene) -> list[list[Trajectory]]:
    """Groups of 8 search episodes: prompt, then completion and observation by turns, then a completion."""
    source = random.Random(1)

    def one(group: int, k: int) -> Trajectory:
        parts = [source.randint(8, 20), source.randint(*scene.completion)]
        for _ in range(source.choice(scene.searches)):
            parts += [source.randint(*scene.observation), source.randint(*scene.completion)]
        mask = np.concatenate([np.full(length, index % 2, np.uint8) for index, length in enumerate(parts)])
        reward = float((group + k) % 2)
        return Trajectory(
            ticket=Ticket(purpose=Purpose.TRAIN, ordinal=group, k=k, attempt=0),
            task_id=str(group),
            source="benchmark",
            token_ids=np.array([source.randrange(scene.vocabulary) for _ in mask], np.int32),
            loss_mask=mask,
            behaviour_logprobs=np.where(mask == 1, -np.log(scene.vocabulary), 0.0).astype(np.float32),
            versions=np.where(mask == 1, 0, -1).astype(np.int32),
            turns=(),
            reward=Reward(total=reward, tokens=(len(mask) - 1,), amounts=(reward,)),
            stop=StopReason.ANSWERED,
            dispatched_s=0.0,
            finished_s=1.0,
            worker=0,
            incarnation=0,
            temperature=1.0,
        )

    return [[one(group, k) for k in range(8)] for group in range(scene.trajectories // 8)]


def recipe_of(scene: Scene) -> Recipe:
    """What the learner reads of a recipe."""
    settings: dict[str, Any] = {
        "name": "benchmark",
        "run": {"steps": 100},
        "model": {"architecture": {}, "tokenizer": "none"},
        "tasks": {"train": [{"path": "none"}]},
        "env": {"factory": "none:None"},
        "learner": {"learning_rate": 1e-5, "tokens_per_micro_batch": scene.micro_batch_tokens},
    }
    return Recipe.model_validate(settings)


def write_model(scene: Scene, directory: Path) -> Path:
    """A Qwen2 model of the scene's size with random weights."""
    config = Qwen2Config(
        vocab_size=scene.vocabulary,
        hidden_size=scene.hidden,
        intermediate_size=3 * scene.hidden,
        num_hidden_layers=scene.layers,
        num_attention_heads=scene.heads,
        num_key_value_heads=scene.heads,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


def cpu_seconds(work: Callable[[], object]) -> float:
    """CPU seconds of this process."""
    started = time.process_time()
    work()
    return time.process_time() - started


def verdict(good: bool, claim: str) -> str:
    """A claim and whether it was kept."""
    return f"{claim}: {'kept' if good else 'MISSED'}"


if __name__ == "__main__":
    sys.exit(main())
