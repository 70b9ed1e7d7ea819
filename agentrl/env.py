"""The contract between an environment and the rest. All that an environment author needs to import.

An environment is one conversation: made for one task, used once, closed. It sees text, never tokens.

    class Guess(Environment):
        stop_strings = ("</answer>",)

        async def start(self, task: Task) -> Observation:
            self.task = task
            return Observation.user(task.prompt)

        async def step(self, completion: str) -> StepResult:
            right = f"<answer>{self.task.answers[0]}</answer>" in completion
            return StepResult(action="answer", stop=StopReason.ANSWERED, parts={"right": float(right)})

An environment that cannot do its work (its tool is down) raises `errors.EnvironmentFailure`: the episode is then tried again
and in the end dropped by cause, never scored 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from agentrl.types import StopReason, Task, ToolCall

__all__ = ["Environment", "Observation", "Segment", "StepResult"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """A piece of an observation. It is tokenised on its own.

    In `untrusted` text no control token of the tokenizer can occur, whatever it says; and only untrusted text is cut when a token
    budget is short. Frames are the environment's own words: they may hold control tokens and are never cut.
    """

    text: str
    untrusted: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """What the policy sees next: segments, in order.

    With a `role` ("user", "tool") the segments are wrapped as one message by the tokenizer's chat template, where it has one; without,
    they are appended as they are (Search-R1's raw-text observations).
    """

    segments: tuple[Segment, ...]
    role: str | None = None
    neutralised: int = 0  # closing tags of the environment that were found in untrusted text and made harmless

    @classmethod
    def frame(cls, text: str) -> Observation:
        """The environment's own words, appended as they are."""
        return cls(segments=(Segment(text=text),))

    @classmethod
    def user(cls, text: str) -> Observation:
        """A message of the user's: wrapped by the chat template; its text can hold no control token."""
        return cls(segments=(Segment(text=text, untrusted=True),), role="user")

    @classmethod
    def framed(cls, before: str, untrusted: str, after: str, *, neutralised: int = 0) -> Observation:
        """Untrusted text between two frames of the environment."""
        return cls(segments=(Segment(text=before), Segment(text=untrusted, untrusted=True), Segment(text=after)), neutralised=neutralised)

    @property
    def text(self) -> str:
        """The segments joined, for eyes and logs."""
        return "".join(segment.text for segment in self.segments)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What an environment says to a completion.

    Args:
        observation: what the policy sees next; None where the episode ends here.
        stop: why the episode ends here; None where it goes on. Exactly one of `observation` and `stop` is set.
        parts: named parts of the reward earned by this turn. The reward of the episode is the sum of all turns' parts.
        measures: named numbers to be known beside the reward, of which nothing is earned, such as plain exact match beside a shaped reward.
            They are added up over turns, logged and looked up like parts; no name is both.
        action: what the completion was understood as ("search", "answer", "invalid", ...); `argument` is its text.
    """

    observation: Observation | None = None
    stop: StopReason | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    measures: Mapping[str, float] = field(default_factory=dict)
    action: str = ""
    argument: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    def __post_init__(self) -> None:
        if (self.observation is None) == (self.stop is None):
            raise ValueError("a StepResult has either an observation (the episode goes on) or a stop reason (it ends)")
        both = sorted(self.parts.keys() & self.measures.keys())
        if both:
            raise ValueError(f"a number either is a part of the reward or stands beside it: {', '.join(both)} is in parts and in measures")


class Environment:
    """One conversation about one task. Subclass it, or write any class with the same members.

    It is made anew for every episode as `factory(**options)`, inside a trio task: `start` and `step` may await anything of trio.
    """

    stop_strings: Sequence[str] = ()

    async def start(self, task: Task) -> Observation:
        """The prompt."""
        raise NotImplementedError

    async def step(self, completion: str) -> StepResult:
        """Answer a completion, given as text up to and including the stop string that ended it, special tokens shown."""
        raise NotImplementedError

    async def close(self) -> None:
        """Free what the conversation held. Called exactly once, also when it failed or was cancelled."""
