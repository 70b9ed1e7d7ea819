"""The records that travel between the processes of a run. Frozen, keyword-only, plain: no torch, no I/O.

    Task ──(ordinal, k)──> Ticket ──episode──> Trajectory ──group──> batch

Words are those of docs/architecture.md. Times are seconds since the epoch (`_s`), lengths are tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from agentrl.errors import TrajectoryError

__all__ = [
    "INFRASTRUCTURE_CAUSES",
    "TOKEN_ARRAYS",
    "CloseCause",
    "Purpose",
    "Reward",
    "Span",
    "StopReason",
    "Task",
    "Ticket",
    "ToolCall",
    "Trajectory",
    "Turn",
]

TOKEN_ARRAYS = ("token_ids", "loss_mask", "behaviour_logprobs", "versions")

Span = tuple[int, int]  # [start, end) in tokens of a trajectory


class Purpose(StrEnum):
    """Why a ticket was issued."""

    TRAIN = "train"
    EVAL = "eval"


class StopReason(StrEnum):
    """Why an episode ended by the policy's own doing: it carries the reward it earned."""

    ANSWERED = "answered"  # the environment says so: the task is done
    TURN_LIMIT = "turn_limit"  # the environment's turns are used up
    INVALID_LIMIT = "invalid_limit"  # too many invalid actions in a row
    COMPLETION_LIMIT = "completion_limit"  # the environment ended it on a turn that ran into its token limit
    OBSERVATION_LIMIT = "observation_limit"  # an observation did not fit its token limit, frames included
    CONTEXT_LIMIT = "context_limit"  # prompt + turns reached the context limit


class CloseCause(StrEnum):
    """The one outcome of a ticket: `trajectory`, or why there is none."""

    TRAJECTORY = "trajectory"
    TOOL_ERROR = "tool_error"
    TOOL_TIMEOUT = "tool_timeout"
    ENVIRONMENT_ERROR = "environment_error"
    REWARD_ERROR = "reward_error"
    ENGINE_ERROR = "engine_error"
    DEADLINE = "deadline"
    PROMPT_LIMIT = "prompt_limit"
    LOST = "lost"  # a process of ours died or the run was resumed: counts neither as attempt nor as failure
    GROUP_CLOSED = "group_closed"  # its group was dropped while it ran
    RUN_END = "run_end"  # the run has its last step; the sample counts as not yet issued


INFRASTRUCTURE_CAUSES = frozenset(
    {
        CloseCause.TOOL_ERROR,
        CloseCause.TOOL_TIMEOUT,
        CloseCause.ENVIRONMENT_ERROR,
        CloseCause.REWARD_ERROR,
        CloseCause.ENGINE_ERROR,
        CloseCause.DEADLINE,
        CloseCause.PROMPT_LIMIT,
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One question with what is needed to score it.

    `prompt` is the user's text; `messages` is set instead where the data file holds a whole chat.
    """

    id: str
    prompt: str
    answers: tuple[str, ...] = ()
    source: str = "default"
    messages: tuple[Mapping[str, str], ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Ticket:
    """One attempt at a sample. `name` is its identity everywhere: on the wire, in the journal, as idempotency key."""

    purpose: Purpose
    ordinal: int  # of the task, in the run's (or the evaluation's) order
    k: int  # 0..n-1
    attempt: int  # 0, 1, ...
    evaluation: str = ""  # id of the evaluation an eval ticket belongs to

    @property
    def name(self) -> str:
        """E.g. `train/12/3/0`, or `eval:heldout@20/7/0/0`."""
        head = f"{self.purpose}:{self.evaluation}" if self.evaluation else str(self.purpose)
        return f"{head}/{self.ordinal}/{self.k}/{self.attempt}"

    @property
    def sample(self) -> tuple[int, int]:
        """(task ordinal, k)."""
        return (self.ordinal, self.k)


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """One use of a tool within a turn."""

    tool: str
    arguments_hash: str  # blake2b-128 of the arguments as sent, hex
    result_ids: tuple[str, ...] = ()  # e.g. ids of the passages returned
    latency_s: float = 0.0
    error: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One completion and the observation that answered it, as spans of the trajectory's tokens."""

    completion: Span
    observation: Span  # empty where none came
    action: str  # what the environment understood: "search", "answer", "invalid", ...
    argument: str  # the action's text, e.g. the query
    stop: str  # why the completion ended: a stop string, "eos" or "length"
    engine: str
    started_s: float
    generated_s: float  # when the completion was there
    ended_s: float  # when the observation was there
    tool_calls: tuple[ToolCall, ...] = ()
    truncated: bool = False  # the observation was cut to its token limit
    neutralised: int = 0  # closing tags of the environment found in untrusted text and made harmless


@dataclass(frozen=True, kw_only=True, slots=True)
class Reward:
    """What an episode earned. `tokens` says on which generated token each entry of `amounts` lands; the sum of amounts is `total`.

    `parts` holds the named parts of the total, and the environment's measures (`env.StepResult`), which are not in it.
    """

    total: float
    parts: Mapping[str, float] = field(default_factory=dict)
    tokens: tuple[int, ...] = ()
    amounts: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trajectory:
    """What one finished episode leaves behind: four token-aligned arrays and how it went.

    With prompt P, completions C0 C1 and observations O0, one chunk per letter:

        token_ids            P  C0 O0 C1
        loss_mask            0  1  0  1      the policy wrote it
        behaviour_logprobs   0  x  0  x      as sampled, log_softmax(logits / T)
        versions            -1  v -1  w      the weights that wrote it, as the engine said (w > v: updated in mid-episode)
    """

    ticket: Ticket
    task_id: str
    source: str
    token_ids: npt.NDArray[np.int32]  # [T]
    loss_mask: npt.NDArray[np.uint8]  # [T]
    behaviour_logprobs: npt.NDArray[np.float32]  # [T]
    versions: npt.NDArray[np.int32]  # [T]
    turns: tuple[Turn, ...]
    reward: Reward
    stop: StopReason
    dispatched_s: float
    finished_s: float
    worker: int  # index of the rollout worker
    incarnation: int  # ... and its incarnation
    temperature: float = 1.0

    def __post_init__(self) -> None:
        lengths = {name: len(getattr(self, name)) for name in TOKEN_ARRAYS}
        if len(set(lengths.values())) != 1:
            raise TrajectoryError(f"token arrays of {self.ticket.name} differ in length: {lengths}")
        outside = self.loss_mask == 0
        if (self.behaviour_logprobs[outside] != 0.0).any() or (self.versions[outside] != -1).any():
            raise TrajectoryError(f"{self.ticket.name}: a token outside the loss mask carries a log-prob or a version")
        if (self.versions[~outside] < 0).any():
            raise TrajectoryError(f"{self.ticket.name}: a generated token carries no version")
        if any(not (0 <= t < len(self.loss_mask) and self.loss_mask[t]) for t in self.reward.tokens):
            raise TrajectoryError(f"{self.ticket.name}: a reward lands on a token the policy did not write: {self.reward.tokens}")

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def prompt_length(self) -> int:
        """Tokens before the first completion."""
        return self.turns[0].completion[0] if self.turns else len(self)

    @property
    def generated(self) -> int:
        """Number of tokens the policy wrote."""
        return int(self.loss_mask.sum())

    @property
    def first_version(self) -> int:
        """Version of the first generated token, -1 where there is none."""
        written = self.versions[self.loss_mask == 1]
        return int(written[0]) if len(written) else -1

    @property
    def version_count(self) -> int:
        """How many versions wrote it."""
        return len(np.unique(self.versions[self.loss_mask == 1]))
