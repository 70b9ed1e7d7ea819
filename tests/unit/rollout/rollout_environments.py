"""Small environments that the rollout tests play."""

import re

import trio

from agentrl.env import Environment, Observation, Segment, StepResult
from agentrl.errors import EnvironmentFailure
from agentrl.types import StopReason


class Lookup(Environment):
    """`<search> key </search>` is answered from a dictionary; `<answer>` ends it. Every search earns 0.25, the right answer 1."""

    stop_strings = ("</search>", "</answer>")

    def __init__(self, passages=None, *, fails=None, hangs=False, close_fails=False):
        self.passages = passages or {}
        self.fails = fails
        self.hangs = hangs
        self.close_fails = close_fails
        self.closed = 0
        self.completions = []

    async def start(self, task):
        self.answer = task.answers[0]
        return Observation(segments=(Segment(text=task.prompt, untrusted=True),))

    async def step(self, completion):
        self.completions.append(completion)
        if self.hangs:
            await trio.sleep_forever()
        if self.fails is not None:
            raise self.fails
        match = re.search(r"<(search|answer)>(.*?)</\1>", completion)
        if match is None:
            return StepResult(observation=Observation.frame("invalid"), action="invalid")
        action, argument = match[1], match[2].strip()
        if action == "answer":
            return StepResult(stop=StopReason.ANSWERED, parts={"right": float(argument == self.answer)}, action=action, argument=argument)
        found = Observation.framed("<information> ", self.passages.get(argument, "nothing"), " </information>")
        return StepResult(observation=found, parts={"searched": 0.25}, action=action, argument=argument)

    async def close(self):
        await trio.lowlevel.checkpoint()  # as whatever closes something real does
        self.closed += 1
        if self.close_fails:
            raise RuntimeError("close failed")


def tool_down():
    return EnvironmentFailure("the retriever is down", cause="tool_error")
