"""The canary against engines that say what they are told to: gaps of known numbers, and what is made of them."""

import json
import math

import httpx
import numpy as np
import pytest
import trio
from learner_scene import VOCABULARY, tiny_model, tiny_recipe, tiny_tokenizer
from trio.testing import MockClock

from agentrl.engine_api import EngineClient
from agentrl.errors import EngineRefused, HealthError
from agentrl.learner.learner import Learner
from agentrl.learner.ranks import Ranks
from agentrl.rollout.tokens import TokenEncoder
from agentrl.system.canary import Canary, canary_sequences, learner_logprobs
from agentrl.system.verdict import Gap
from agentrl.testing.engine import FakeEngine
from agentrl.types import Task
from agentrl.weights import Snapshot

pytestmark = pytest.mark.slow  # a real learner is made once

SEQUENCES = [[5, 6, 7, 8], [9, 10, 11, 12]]
LATER = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def learner(tmp_path_factory) -> Learner:
    folder = tmp_path_factory.mktemp("canary")
    return Learner.build(tiny_recipe(), tiny_model(folder), Ranks.single(), folder)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> TokenEncoder:
    return TokenEncoder.load(tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def snapshot(learner) -> Snapshot:
    return Snapshot.of(0, 0, learner.gather(1 << 20))


def a_canary(*, every=1, bounds=(0.1, 0.1), checksums=False) -> Canary:
    return Canary(SEQUENCES, every=every, bounds=bounds, deadline_s=5.0, checksums=checksums)


def an_engine(learner, encoder, *, shift=0.0, version=0, staged=True) -> FakeEngine:
    """One that gives the learner's log-probs, each `shift` lower."""
    said = {tuple(ids): logprobs for ids, logprobs in zip(SEQUENCES, learner_logprobs(learner, SEQUENCES), strict=True)}
    engine = FakeEngine(lambda body: (), encoder=encoder, version=version, staged_update=staged)
    engine.scores = lambda ids: (said[tuple(ids)] - np.float32(shift)).tolist()
    return engine


def check(canary, snapshot, engines, tmp_path) -> None:
    async def main() -> None:
        await canary.check(snapshot, [engine.client(index) for index, engine in enumerate(engines)], run_dir=tmp_path, model_dir=tmp_path)

    trio.run(main, clock=MockClock(autojump_threshold=0))


def lines(tmp_path) -> list[dict]:
    return [json.loads(line) for line in (tmp_path / "canary.jsonl").read_text().splitlines()]


def test_a_gap_by_hand():
    learner = [np.array([-1.0, -2.0], np.float32), np.array([-3.0, -4.0], np.float32)]
    gap = Gap.of(3, learner, [np.array([-1.0, -2.5], np.float32), np.array([-3.0, -3.0], np.float32)])
    assert (gap.engine, gap.largest, gap.mean, gap.by_sequence) == (3, 1.0, 0.375, (0.5, 1.0))
    assert gap.at == (1, 2)  # the third token: the first has no log-prob
    assert str(gap) == "1 at most (sequence 1, token 2) and 0.38 on average; by sequence 0.5, 1"


def test_a_log_prob_that_is_no_number_is_an_infinite_gap():
    gap = Gap.of(0, [np.array([-1.0, -2.0], np.float32)], [np.array([-1.0, np.nan], np.float32)])
    assert (gap.largest, gap.mean) == (math.inf, math.inf)
    assert gap.to_plain() == {"engine": 0, "gap_max": None, "gap_mean": None, "by_sequence": [None]}


def test_sequences_are_half_a_prompt_and_half_drawn_from_the_seed_without_control_tokens(encoder):
    tasks = [Task(id="a", prompt="w3 w4 w5 w6 w7 w8 w9"), Task(id="b", prompt="w20")]
    made = canary_sequences(encoder, tasks, count=3, tokens=12, vocabulary=VOCABULARY, seed=7)
    assert [len(ids) for ids in made] == [12, 12, 12]
    assert made[0][:6] == (3, 4, 5, 6, 7, 8)
    assert made[1][0] == 20
    assert made[2][:6] == made[0][:6]  # tasks in turn
    assert made[2][6:] != made[0][6:]
    assert canary_sequences(encoder, tasks, count=3, tokens=12, vocabulary=VOCABULARY, seed=7) == made
    assert canary_sequences(encoder, tasks, count=3, tokens=12, vocabulary=VOCABULARY, seed=8) != made
    assert max(max(ids) for ids in canary_sequences(encoder, tasks, count=3, tokens=40, vocabulary=10, seed=7)) < 10


def test_engines_that_agree_are_told_with_the_next_step_once(learner, encoder, snapshot, tmp_path):
    canary = a_canary(checksums=True)
    trio.run(canary.listen, learner, 0)
    engines = [an_engine(learner, encoder), an_engine(learner, encoder, shift=0.0625)]
    check(canary, snapshot, engines, tmp_path)
    told = canary.take_metrics()
    assert told == {"canary/gap_max": pytest.approx(0.0625), "canary/gap_mean": pytest.approx(0.0625)}
    assert canary.take_metrics() == {}
    (line,) = lines(tmp_path)
    assert (line["version"], line["checksum"], line["unheard"]) == (0, snapshot.checksum, [])
    assert [engine["gap_max"] for engine in line["engines"]] == pytest.approx([0.0, 0.0625], abs=1e-6)
    assert [engine["checksum"] for engine in line["engines"]] == ["0", "0"]
    assert engines[0].calls.count("/generate") == 2


def test_other_arithmetic_with_the_bytes_that_were_sent_is_the_kernels(learner, encoder, snapshot, tmp_path):
    canary, engine = a_canary(), an_engine(learner, encoder, shift=0.25)
    engine.checksums = dict(snapshot.checksums)
    trio.run(canary.listen, learner, 0)
    with pytest.raises(HealthError, match=r"engine 0 .* 0\.25 at most .* The KERNELS differ: all \d+ tensors .* bit for bit what was sent") as told:
        check(canary, snapshot, [engine], tmp_path)
    assert "Even what follows the first token is wrong" in str(told.value)
    assert "canary.jsonl" in str(told.value)


def test_other_weights_are_told_with_the_first_tensor_in_the_models_order(learner, encoder, snapshot, tmp_path):
    canary, engine = a_canary(), an_engine(learner, encoder, shift=0.25)
    engine.checksums = dict(snapshot.checksums) | {LATER: "0", "model.norm.weight": "1"}
    trio.run(canary.listen, learner, 0)
    with pytest.raises(HealthError, match=f"The WEIGHTS differ: {LATER} is the first of 2 tensors"):
        check(canary, snapshot, [an_engine(learner, encoder), engine], tmp_path)


def test_an_engine_with_checksums_of_its_own_is_compared_with_itself_after_a_load_from_disk(learner, encoder, snapshot, tmp_path):
    canary, engine = a_canary(), an_engine(learner, encoder, shift=0.25, staged=False)
    engine.checksums, engine.checksums_on_disk = {"a": "1", "b": "2"}, {"a": "1", "b": "3"}
    trio.run(canary.listen, learner, 0)
    with pytest.raises(HealthError, match=r"The WEIGHTS differ \(the engines do not agree with each other\): b is not what it loads from disk"):
        check(canary, snapshot, [engine, an_engine(learner, encoder, staged=False)], tmp_path)
    assert (tmp_path / "weights" / "v0" / "model.safetensors").exists()

    canary, engine.checksums_on_disk = a_canary(), engine.checksums
    trio.run(canary.listen, learner, 0)
    with pytest.raises(HealthError, match="The KERNELS differ: it holds the same 2 tensors when it loads this version from disk"):
        check(canary, snapshot, [engine], tmp_path)
    assert engine.calls[-3:] == ["/update_weights_from_disk", "/weights_checker", "/continue_generation"]


class NoLoads(httpx.AsyncBaseTransport):
    """An engine that refuses to load from disk."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine

    def client(self, index: int) -> EngineClient:
        return EngineClient("http://engine", index, transport=self)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/update_weights_from_disk":
            return httpx.Response(400, json={"success": False, "message": "no such directory here"})
        return await self._engine.handle_async_request(request)


def test_an_engine_that_cannot_load_from_disk_generates_on(learner, encoder, snapshot, tmp_path):
    canary, engine = a_canary(), an_engine(learner, encoder, shift=0.25, staged=False)
    engine.checksums = {"a": "1"}
    trio.run(canary.listen, learner, 0)
    with pytest.raises(HealthError, match=r"it could not load the version from disk .*no such directory here"):
        check(canary, snapshot, [NoLoads(engine)], tmp_path)
    assert engine.calls[-2:] == ["/pause_generation", "/continue_generation"]


def test_an_embedded_engine_that_holds_another_dtype_is_compared_with_itself_too(learner, encoder, snapshot, tmp_path):
    canary, engine = a_canary(), an_engine(learner, encoder, shift=0.25)
    engine.checksums = engine.checksums_on_disk = dict.fromkeys(snapshot.checksums, "of bfloat16")
    trio.run(canary.listen, learner, 0)
    with pytest.raises(HealthError, match="The KERNELS differ: it holds the same"):
        check(canary, snapshot, [engine], tmp_path)


def test_an_engine_at_another_version_is_not_compared_and_the_next_version_is_checked(learner, encoder, snapshot, tmp_path):
    canary = a_canary(every=5)
    trio.run(canary.listen, learner, 0)
    check(canary, snapshot, [an_engine(learner, encoder, shift=9.0, version=1)], tmp_path)
    assert lines(tmp_path)[0]["unheard"] == [0]
    trio.run(canary.listen, learner, 1)  # due: 0 was not heard
    with pytest.raises(HealthError):
        check(canary, Snapshot.of(1, 1, learner.gather(1 << 20)), [an_engine(learner, encoder, shift=9.0, version=1)], tmp_path)


def test_an_engine_that_gives_no_checksums_does_not_hide_anothers_gap(learner, encoder, snapshot, tmp_path):
    canary, astray, silent = a_canary(checksums=True), an_engine(learner, encoder, shift=0.25), an_engine(learner, encoder)
    silent._checksum = lambda: httpx.Response(503)
    trio.run(canary.listen, learner, 0)
    with pytest.raises(HealthError, match=r"engine 0 .* 0\.25 at most"):
        check(canary, snapshot, [astray, silent], tmp_path)
    line = lines(tmp_path)[0]
    assert [("checksum" in engine, engine["engine"]) for engine in line["engines"]] == [(True, 0), (False, 1)]


def test_a_refusal_to_score_is_one_error_and_no_gap_is_hidden_by_it(learner, encoder, snapshot, tmp_path):
    def refuse(ids):
        raise EngineRefused("no")

    refusing = an_engine(learner, encoder)
    refusing.scores = refuse
    for shift, error in ((0.0, EngineRefused), (0.25, HealthError)):
        canary = a_canary()
        trio.run(canary.listen, learner, 0)
        with pytest.raises(error):
            check(canary, snapshot, [an_engine(learner, encoder, shift=shift), refusing], tmp_path)
    assert [line.get("unheard") for line in lines(tmp_path)] == [[1], [1], None]


def test_a_dead_engine_is_not_heard_and_no_reason_to_stop(learner, encoder, snapshot, tmp_path):
    canary, dead, frozen = a_canary(), an_engine(learner, encoder), an_engine(learner, encoder)
    dead.dead, frozen.frozen = True, True
    trio.run(canary.listen, learner, 0)
    check(canary, snapshot, [an_engine(learner, encoder), dead, frozen], tmp_path)
    assert lines(tmp_path)[0]["unheard"] == [1, 2]


def test_every_third_version_is_checked_and_one_that_was_superseded_is_made_up_for(learner, encoder, tmp_path):
    canary, engine = a_canary(every=3), an_engine(learner, encoder)
    checked = []
    for version in range(9):
        trio.run(canary.listen, learner, version)
        if version == 3:  # due, and never published
            continue
        engine.weight_version = str(version)
        check(canary, Snapshot.of(version, version, learner.gather(1 << 20)), [engine], tmp_path)
        checked = [line["version"] for line in lines(tmp_path)]
    assert checked == [0, 5, 8]
