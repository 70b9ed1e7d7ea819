"""The engine protocol's client: what it sends, what it makes of answers, what it makes of errors."""

import json

import httpx
import numpy as np
import pytest
import trio
import trio.testing

from agentrl.engine_api import EngineClient, EngineLoad, Finish, GenerateReply, GenerateRequest, WeightBucket, WeightSpan
from agentrl.errors import EngineError, EngineRefused, EngineUnavailable
from agentrl.testing.engine import FakeEngine
from agentrl.testing.tokenizer import word_encoder

# an answer of a real SGLang 0.5.23 server, tokens and numbers aside
ANSWER = {
    "text": "a b c",
    "output_ids": [204, 331, 418],
    "meta_info": {
        "id": "rid",
        "finish_reason": {"type": "length", "length": 3},
        "prompt_tokens": 10,
        "weight_version": "8",
        "num_retractions": 0,
        "input_token_logprobs": [],
        "output_token_logprobs": [[-3.75, 204, None], [-4.5, 331, None], [-0.25, 418, None]],
        "output_token_logprobs_length": 3,
        "completion_tokens": 3,
        "cached_tokens": 9,
        "weight_versions": [{"version": "7", "start": 0, "end": 2}, {"version": "8", "start": 2, "end": 3}],
        "cached_tokens_details": {"device": 9, "host": 0},
        "dp_rank": None,
        "e2e_latency": 0.46,
    },
}


def answer(**meta):
    return ANSWER | {"meta_info": ANSWER["meta_info"] | meta}


class Answers(httpx.AsyncBaseTransport):
    """Answers every call with one response, or raises one error; None never answers."""

    def __init__(self, response):
        self.response = response
        self.requests = []

    async def handle_async_request(self, request):
        self.requests.append((request.method, request.url.raw_path.decode(), json.loads(request.content) if request.content else None))
        if self.response is None:
            await trio.sleep_forever()
        if isinstance(self.response, Exception):
            raise self.response
        return self.response


def ask(response, call, **options):
    """(what `call(client)` returned, the requests it made)."""
    transport = Answers(response)

    async def main():
        async with EngineClient("http://e/", 1, transport=transport, **options) as client:
            return await call(client)

    return trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0)), transport.requests


def generate(client, ids=(1, 2)):
    return client.generate(GenerateRequest(rid="r", input_ids=ids, max_new_tokens=3))


def ok(**more):
    return httpx.Response(200, json={"success": True, "message": "", **more})


def test_a_completion_has_its_tokens_log_probs_and_the_versions_of_each():
    reply, _ = ask(httpx.Response(200, json=ANSWER), generate)
    assert (reply.output_ids.tolist(), reply.logprobs.tolist()) == ([204, 331, 418], [-3.75, -4.5, -0.25])
    assert reply.spans == (WeightSpan(version=7, start=0, end=2), WeightSpan(version=8, start=2, end=3))
    assert reply.finish == Finish(kind="length")
    assert (reply.prompt_tokens, reply.cached_tokens, reply.text) == (10, 9, "a b c")


def test_an_aborted_request_from_the_queue_keeps_the_tokens_it_comes_with():
    meta = {"id": "r", "finish_reason": {"type": "abort", "message": "Abort in waiting queue"}, "weight_version": "7"}
    reply = GenerateReply.parse({"output_ids": [5], "meta_info": meta | {"output_token_logprobs": [[-1.0, 5, None]]}})
    assert (reply.output_ids.tolist(), reply.finish.kind, reply.spans) == ([5], "abort", (WeightSpan(version=7, start=0, end=1),))
    empty = GenerateReply.parse({"output_ids": [], "meta_info": meta})
    assert (len(empty.output_ids), empty.spans) == (0, ())


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (answer(output_token_logprobs=[[-1.0, 204, None]]), "3 tokens with 1 log-probs"),
        (answer(output_token_logprobs=[[-1.0, 204, None], [None, 1, None], [-1.0, 1, None]]), "not finite"),
        (answer(weight_versions=[{"version": "7", "start": 0, "end": 2}]), "do not cover the 3 tokens"),
        (answer(weight_versions=[{"version": "7", "start": 0, "end": 1}, {"version": "8", "start": 2, "end": 3}]), "do not cover"),
        (answer(weight_versions=[{"version": "default", "start": 0, "end": 3}]), "named 'default'.*--weight-version 0"),
        (answer(finish_reason={"type": "tired"}), "'tired': expected stop, length or abort"),
        (answer(finish_reason=None), "not a reply of /generate"),
        ([ANSWER], "not a reply of /generate"),
        ({"output_ids": [1]}, "not a reply of /generate"),
    ],
)
def test_an_answer_that_contradicts_itself_is_an_engine_error(value, message):
    with pytest.raises(EngineError, match=message) as raised:
        GenerateReply.parse(value)
    assert type(raised.value) is EngineError


@pytest.mark.parametrize(
    ("response", "error", "message"),
    [
        (httpx.Response(400, json={"error": {"message": "too long"}}), EngineRefused, "engine 1 .* refused /generate: 400 too long"),
        (httpx.Response(400, json={"error": "unknown field"}), EngineRefused, "unknown field"),
        (httpx.Response(400, json={"object": "error", "message": "bad body"}), EngineRefused, "bad body"),
        (httpx.Response(404, json={"detail": "Not Found"}), EngineRefused, "Not Found"),
        (httpx.Response(503, text="busy"), EngineUnavailable, "503 busy"),
        (httpx.ConnectError("refused"), EngineUnavailable, "cannot be reached"),
        (httpx.ReadError("broke"), EngineUnavailable, "broke"),
        (None, EngineUnavailable, "did not answer /generate within 120 s"),
        (httpx.Response(200, text="<html>"), EngineError, "no JSON"),
    ],
)
def test_refusals_and_failures_are_told_apart(response, error, message):
    with pytest.raises(error, match=message):
        ask(response, generate)


@pytest.mark.parametrize("ids", [(), (-1,), (3, 9), np.array([9], dtype=np.int32)])
def test_ids_that_would_end_a_server_are_refused_before_they_are_sent(ids):
    with pytest.raises(EngineRefused):
        ask(httpx.Response(200, json=ANSWER), lambda client: generate(client, ids), vocab_size=9)


def test_weights_are_named_by_strings_and_sent_in_flat_buckets():
    bucket = WeightBucket(names=("a", "b"), dtypes=("float32", "float32"), shapes=((2, 3), ()))
    _, requests = ask(ok(), lambda client: client.update_from_distributed(bucket, group="g", version=12, flush_cache=True))
    assert requests == [
        (
            "POST",
            "/update_weights_from_distributed",
            {
                "names": ["a", "b"],
                "dtypes": ["float32", "float32"],
                "shapes": [[2, 3], []],
                "group_name": "g",
                "flush_cache": True,
                "abort_all_requests": False,
                "load_format": "flattened_bucket",
                "weight_version": "12",
            },
        )
    ]


@pytest.mark.parametrize(
    ("call", "path", "body"),
    [
        (lambda c: c.abort("r"), "/abort_request", {"rid": "r"}),
        (lambda c: c.abort_all(), "/abort_request", {"abort_all": True}),
        (lambda c: c.pause(), "/pause_generation", {"mode": "retract"}),
        (lambda c: c.continue_(), "/continue_generation", {}),
        (lambda c: c.flush_cache(), "/flush_cache", None),
        (lambda c: c.begin_update(), "/begin_weight_update", {}),
        (lambda c: c.end_update(), "/end_weight_update", {}),
        (lambda c: c.destroy_group("g"), "/destroy_weights_update_group", {"group_name": "g"}),
        (
            lambda c: c.init_group(address="127.0.0.1", port=5, rank_offset=1, world_size=3, group="g", backend="gloo"),
            "/init_weights_update_group",
            {"master_address": "127.0.0.1", "master_port": 5, "rank_offset": 1, "world_size": 3, "group_name": "g", "backend": "gloo"},
        ),
        (
            lambda c: c.update_from_disk("/m", version=3),
            "/update_weights_from_disk",
            {"model_path": "/m", "flush_cache": True, "abort_all_requests": False, "weight_version": "3"},
        ),
    ],
)
def test_control_calls_say_what_sglang_expects(call, path, body):
    _, requests = ask(ok(), call)
    assert requests == [("POST", path, body)]


def test_an_update_that_did_not_succeed_is_refused_though_it_was_answered_200():
    with pytest.raises(EngineRefused, match="no such group"):
        ask(httpx.Response(200, json={"success": False, "message": "no such group"}), lambda client: client.end_update())


def test_a_group_without_a_name_is_never_asked_for():
    with pytest.raises(EngineRefused, match="needs a name"):
        ask(ok(), lambda c: c.init_group(address="a", port=1, rank_offset=1, world_size=2, group="", backend="gloo"))


def test_what_an_engine_is_and_does_is_read_from_its_own_pages():
    encoder = word_encoder([])

    async def main():
        engine = FakeEngine(lambda body: [1], encoder=encoder, version=4, staged_update=True)
        async with engine.client() as client:
            assert (await client.model_info()).version == 4
            assert (await client.server_info()).staged_update
            assert (await client.weights_checksum()).engine == "4"
            assert await client.loads() == EngineLoad(running=0, waiting=0)
            assert await client.ready()
            await client.pause()
            assert (await client.health(), await client.ready()) == (True, False)
            engine.dead = True
            assert not await client.health()

    trio.run(main)


def test_weights_with_a_name_of_their_own_have_no_version():
    info, _ = ask(httpx.Response(200, json={"model_path": "m", "weight_version": "default"}), lambda client: client.model_info())
    assert info.version is None


def test_a_prompt_is_scored_without_a_token_being_generated():
    entries = [[None, 5, None], [-1.5, 6, None], [-2.5, 7, None]]
    reply = answer(input_token_logprobs=entries, output_token_logprobs=[]) | {"output_ids": []}
    scores, requests = ask(httpx.Response(200, json=reply), lambda client: client.score([5, 6, 7], rid="canary/8/0/0"))
    assert (scores.ids, scores.logprobs.tolist(), scores.version) == ((5, 6, 7), [-1.5, -2.5], 8)
    body = requests[0][2]
    assert (body["sampling_params"], body["logprob_start_len"]) == ({"max_new_tokens": 0, "temperature": 1.0}, 0)


def test_scores_of_other_tokens_are_an_error_but_sglangs_name_for_the_last_id_is_not():
    entries = [[None, 5, None], [-1.5, 0, None]]
    reply = httpx.Response(200, json=answer(input_token_logprobs=entries))
    assert ask(reply, lambda client: client.score([5, 95], rid="a"))[0].logprobs.tolist() == [-1.5]
    with pytest.raises(EngineError, match="answered with others"):
        ask(reply, lambda client: client.score([6, 95], rid="a"))


def test_a_prompt_whose_scoring_was_aborted_may_be_scored_elsewhere():
    reply = httpx.Response(200, json=answer(finish_reason={"type": "abort", "message": "Abort in waiting queue"}))
    with pytest.raises(EngineUnavailable, match="aborted"):
        ask(reply, lambda client: client.score([5, 6], rid="a"))
