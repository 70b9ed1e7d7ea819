"""What an engine's client reads of JSON, whoever wrote it."""

import httpx
import pytest
import trio

from agentrl.engine_api import EngineClient
from agentrl.engine_messages import GenerateRequest
from agentrl.errors import EngineError

pytestmark = pytest.mark.slow  # imports HTTP

META = b'"meta_info": {"finish_reason": {"type": "stop", "matched": 7}, "output_token_logprobs": [[-0.1, 5, null]], "weight_version": "3"}'


def generated(content: bytes):
    async def main():
        transport = httpx.MockTransport(lambda request: httpx.Response(200, content=content))
        async with EngineClient("http://engine", transport=transport) as engine:
            return await engine.generate(GenerateRequest(rid="a", input_ids=[1, 2], max_new_tokens=1))

    return trio.run(main)


def test_half_a_character_in_the_text_of_a_reply_is_no_error():
    reply = generated(b'{"text": "\\ud83d", "output_ids": [5], ' + META + b"}")
    assert (reply.text, reply.output_ids.tolist()) == ("\ud83d", [5])


@pytest.mark.parametrize("logprob", [b"NaN", b"-Infinity", b"null"])
def test_a_logprob_that_is_no_number_is_an_error(logprob):
    with pytest.raises(EngineError):
        generated(b'{"text": "", "output_ids": [5], ' + META.replace(b"-0.1", logprob) + b"}")


def test_a_logprob_has_the_digits_it_was_sent_with():
    reply = generated(b'{"text": "", "output_ids": [5], ' + META.replace(b"-0.1", b"-1.4012984643248171e-45") + b"}")
    assert reply.logprobs[0] == -1.401298464324817e-45


def test_what_is_no_json_is_an_error_that_shows_it():
    with pytest.raises(EngineError, match="<html>"):
        generated(b"<html>502</html>")
