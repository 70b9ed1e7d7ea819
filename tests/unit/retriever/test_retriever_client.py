import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import trio
from trio.testing import MockClock

from retriever.client import MAX_RESPONSE_BYTES, Passage, RetrieverClient, RetrieverError, RetrieverTimeout

GOOD = {"result": [[{"document": {"id": 7, "contents": '"Oslo"\nOslo is\nold.'}, "score": 0.5}]]}


class Server(httpx.AsyncBaseTransport):
    """Answers by a script: a status with a body, an exception, or seconds to wait before going on."""

    def __init__(self, *script: Any) -> None:
        self._script: Iterator[Any] = iter(script)
        self.requests: list[dict[str, Any]] = []
        self.times: list[float] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(json.loads(request.content))
        self.times.append(trio.current_time())
        for act in self._script:
            if isinstance(act, float):
                await trio.sleep(act)
            elif isinstance(act, Exception):
                raise act
            else:
                status, body, *headers = act
                return httpx.Response(status, content=body if isinstance(body, bytes) else json.dumps(body), headers=headers[0] if headers else None)
        raise AssertionError("an attempt too many")


def play(server: Server, call: Callable[[RetrieverClient], Any] | None = None, **options: Any) -> tuple[Any, float]:
    """What the call gives, and how long it took on the clock of the test."""

    async def main() -> tuple[Any, float]:
        async with RetrieverClient("http://r/", transport=server, **options) as client:
            started = trio.current_time()
            try:
                outcome: Any = await (call(client) if call else client.retrieve(["capital of Norway"], topk=3))
            except RetrieverError as error:
                outcome = error
            return outcome, trio.current_time() - started

    return trio.run(main, clock=MockClock(autojump_threshold=0))


def test_passages_come_with_title_text_and_score():
    server = Server((200, GOOD))
    [[passage]], _ = play(server)
    assert passage == Passage(id="7", contents='"Oslo"\nOslo is\nold.', score=0.5)
    assert (passage.title, passage.text) == ('"Oslo"', "Oslo is\nold.")
    assert server.requests == [{"queries": ["capital of Norway"], "topk": 3, "return_scores": True}]


def test_a_server_that_gives_more_than_asked_for_is_cut():
    many = {"result": [[{"document": {"id": str(i), "contents": "x"}, "score": 1} for i in range(9)]]}
    [[*passages]], _ = play(Server((200, many)))
    assert [passage.id for passage in passages] == ["0", "1", "2"]


def test_a_passage_that_is_no_text_becomes_one():
    [[passage]], _ = play(Server((200, b'{"result": [[{"document": {"id": "1", "contents": "a\\ud800b"}, "score": 1}]]}')))
    assert passage.contents == "a?b"


@pytest.mark.parametrize("failure", [httpx.ConnectError("refused"), httpx.ReadError("broken"), (500, {}), (502, b""), (503, {}), (429, {})])
def test_what_may_pass_is_tried_again(failure: Any):
    server = Server(failure, failure, (200, GOOD))
    [[passage]], seconds = play(server)
    assert passage.id == "7"
    assert 0.05 + 0.1 <= seconds <= 0.15 + 0.3  # pauses of 0.1 s and 0.2 s, each times 0.5 to 1.5


def test_retry_after_is_honoured():
    server = Server((503, {}, {"retry-after": "7"}), (429, {}, {"retry-after": "soon"}), (200, GOOD))
    _, seconds = play(server)
    assert server.times[1] - server.times[0] == pytest.approx(7.0)
    assert seconds < 8.0


def test_a_retry_after_beyond_the_deadline_ends_the_call_at_once():
    error, seconds = play(Server((503, {"detail": "busy"}, {"retry-after": "60"})), deadline_s=30.0)
    assert seconds == 0.0
    assert type(error) is RetrieverError
    assert "answered 503" in str(error)
    assert "busy" in str(error)


def test_a_server_that_stays_down_fails_before_the_deadline():
    server = Server(*[httpx.ConnectError("refused")] * 50)
    error, seconds = play(server, deadline_s=10.0)
    assert 5.0 < seconds <= 10.0
    assert type(error) is RetrieverError
    assert "http://r cannot be reached: refused" in str(error)


def test_a_slow_server_is_left_at_the_deadline():
    error, seconds = play(Server(1000.0, (200, GOOD)), deadline_s=3.0)
    assert seconds == pytest.approx(3.0)
    assert type(error) is RetrieverTimeout
    error, seconds = play(Server((500, {}), 1000.0), lambda client: client.retrieve(["q"], topk=1, deadline_s=2.0), deadline_s=30.0)
    assert seconds == pytest.approx(2.0)
    assert type(error) is RetrieverTimeout


@pytest.mark.parametrize("status", [400, 404, 413, 422])
def test_a_refusal_is_not_tried_again(status: int):
    server = Server((status, {"detail": "topk must be less"}))
    error, _ = play(server)
    assert f"answered {status}" in str(error)
    assert "topk must be less" in str(error)


def hits(*some: Any) -> dict[str, Any]:
    return {"result": [list(some)]}


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (b"<html>", "answered no JSON"),
        (b"\xff", "answered no JSON"),
        (b"[]", 'expected {"result"'),
        ({"result": None}, 'expected {"result"'),
        ({"result": [{}]}, 'expected {"result"'),
        ({"result": []}, "0 lists of passages to 1 queries"),
        ({"result": [[], []]}, "2 lists of passages to 1 queries"),
        (hits("text"), 'expected {"document"'),
        (hits({"document": "text"}), 'expected {"document"'),
        (hits({"document": {"id": "1", "contents": None}, "score": 1}), 'expected {"document"'),
        (hits({"document": {"id": "1"}, "score": 1}), 'expected {"document"'),
        (hits({"document": {"id": "1", "contents": "x"}, "score": "high"}), "expected a finite number as score"),
        (b'{"result": [[{"document": {"id": "1", "contents": "x"}, "score": NaN}]]}', "expected a finite number as score"),
        (b'{"result": [[{"document": {"id": "1", "contents": "x"}, "score": 1%s}]]}' % (b"0" * 400), "expected a finite number as score"),
        (b"[" * 100_000, "answered no JSON"),
    ],
)
def test_an_answer_of_another_shape_is_an_error(body: Any, complaint: str):
    error, _ = play(Server((200, body)))
    assert type(error) is RetrieverError
    assert complaint in str(error)


@pytest.mark.slow
def test_an_answer_without_end_is_refused():
    async def main() -> None:
        async def endless(stream: trio.SocketStream) -> None:
            await stream.receive_some(4096)
            await stream.send_all(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (MAX_RESPONSE_BYTES + 1))

        async with trio.open_nursery() as nursery:
            [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
            nursery.start_soon(trio.serve_listeners, endless, [listener])
            async with RetrieverClient(f"http://127.0.0.1:{listener.socket.getsockname()[1]}") as client:
                with pytest.raises(RetrieverError, match="exceeds the limit"):
                    await client.retrieve(["q"], topk=1)
            nursery.cancel_scope.cancel()

    trio.run(main)


def test_a_url_of_another_protocol_fails_at_once():
    async def main() -> None:
        async with RetrieverClient("ftp://r") as client:
            with pytest.raises(RetrieverError, match="ftp"):
                await client.retrieve(["q"], topk=1)

    trio.run(main)


def test_the_url_may_name_the_route():
    assert RetrieverClient("http://127.0.0.1:8000/retrieve").url == "http://127.0.0.1:8000"
