"""The exception tree. Every error this package raises on purpose is an `AgentRLError`.

    AgentRLError
    ├── ConfigError            a recipe or a command line is wrong; exit code 2
    ├── RecipeCodeError        a function or class that a recipe names raised, or answered what it must not
    ├── DataError              a task file, corpus or warm-start file is wrong; names file and line
    ├── TrajectoryError        a trajectory breaks its own invariants
    ├── WireError              bytes from outside are not what the format says
    ├── EnvironmentFailure     a tool or an environment failed; the ticket closes by cause, never with a reward of 0
    │   └── ToolTimeout        ... because a deadline passed
    ├── EngineError            an engine refused, failed or vanished
    │   ├── EngineRefused      it answered 4xx: a mistake of ours, never retried
    │   └── EngineUnavailable  it did not answer, or 5xx: retried on another engine
    ├── ReplayBufferError      the replay buffer refused a call
    │   ├── StaleIncarnation   the caller is an older incarnation of its role and must end itself
    │   └── BufferUnavailable  it did not answer within its deadline
    ├── JournalError           the journal cannot be opened, read or written; names file and offset
    ├── CheckpointError        a checkpoint is missing, torn, altered or does not fit
    ├── PublishError           weights could not be brought to the engines
    ├── ProcessDied            a process of the run ended when it should not have
    └── HealthError            an alarm ended the run (it may go back no further), or the canary did

`Failure` is the plain record of an exception that crosses a process boundary: foreign exceptions do not pickle well.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass

__all__ = [
    "AgentRLError",
    "BufferUnavailable",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "EngineError",
    "EngineRefused",
    "EngineUnavailable",
    "EnvironmentFailure",
    "Failure",
    "HealthError",
    "JournalError",
    "ProcessDied",
    "PublishError",
    "RecipeCodeError",
    "ReplayBufferError",
    "StaleIncarnation",
    "ToolTimeout",
    "TrajectoryError",
    "WireError",
]


class AgentRLError(Exception):
    """The root of this package's errors."""


class ConfigError(AgentRLError):
    """A recipe or a command line is wrong. The message names file, line and remedy."""


class RecipeCodeError(AgentRLError):
    """A function or class that a recipe names raised, or answered what it must not. The message names the key and the answer."""


class DataError(AgentRLError):
    """A row of a data file is wrong. The message names file and line."""


class TrajectoryError(AgentRLError):
    """A trajectory breaks its own invariants."""


class WireError(AgentRLError):
    """Bytes from outside are not what the format says."""


class EnvironmentFailure(AgentRLError):
    """A tool or an environment failed: infrastructure, so the ticket closes by cause and is tried again.

    Args:
        cause: the cause the ticket is closed by, e.g. "tool_error" (see `types.FailureCause`).
    """

    def __init__(self, message: str, *, cause: str = "environment_error") -> None:
        super().__init__(message)
        self.cause = cause


class ToolTimeout(EnvironmentFailure):
    """A tool did not answer before its deadline."""

    def __init__(self, message: str) -> None:
        super().__init__(message, cause="tool_timeout")


class EngineError(AgentRLError):
    """An engine refused, failed or vanished."""


class EngineRefused(EngineError):
    """An engine answered 4xx: a mistake of ours, never retried."""


class EngineUnavailable(EngineError):
    """An engine did not answer or answered 5xx: tried again, on another engine where there is one."""


class ReplayBufferError(AgentRLError):
    """The replay buffer refused or failed."""


class StaleIncarnation(ReplayBufferError):
    """The caller is an older incarnation of its role: it must end itself."""


class BufferUnavailable(ReplayBufferError):
    """The replay buffer did not answer before the deadline."""


class JournalError(AgentRLError):
    """The journal cannot be opened, read or written."""


class CheckpointError(AgentRLError):
    """A checkpoint is missing, torn, altered, or does not fit the recipe."""


class PublishError(AgentRLError):
    """Weights could not be brought to the engines."""


class ProcessDied(AgentRLError):
    """A process of the run ended when it should not have. The message says which, how, and where its log is."""


class HealthError(AgentRLError):
    """An alarm was raised and the run may, or can, go back no further; or learner and engines disagree. The message says which and what to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """An exception made plain enough to cross a process boundary."""

    kind: str
    message: str
    trace: str = ""

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """The record of `error`, with its traceback as text. Of a group, the first error's: the others mostly follow from it."""
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        return cls(kind=type(error).__name__, message=str(error), trace="".join(traceback.format_exception(error)))
