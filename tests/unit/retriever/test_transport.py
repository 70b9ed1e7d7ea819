"""The HTTP transport, against a server of a few lines in the same loop."""

import re
import ssl
from collections.abc import Callable
from contextlib import asynccontextmanager

import httpx
import pytest
import trio
import trio.testing

from retriever.transport import PooledTransport, ResponseTooLarge, trio_client

pytestmark = pytest.mark.slow  # sockets

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Server:
    """Answers every request with what `answer(request bytes, number of the request on its connection)` says; None closes unanswered."""

    def __init__(self, answer: Callable[[bytes, int], bytes | None] = lambda request, number: OK, *, delay_s: float = 0.0):
        self.answer = answer
        self.delay_s = delay_s
        self.connections = 0
        self.open = 0
        self.most_open = 0
        self.requests: list[bytes] = []
        self.streams: list[trio.SocketStream] = []

    async def serve(self, stream: trio.SocketStream) -> None:
        self.connections += 1
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        self.streams.append(stream)
        try:
            await self._serve(stream)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        finally:
            self.open -= 1

    async def _serve(self, stream: trio.SocketStream) -> None:
        buffered, number = b"", 0
        while chunk := await stream.receive_some():
            buffered += chunk
            head, found, body = buffered.partition(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head.lower())
            if not found or len(body) < int(length[1] if length else 0):
                continue
            self.requests.append(buffered)
            buffered = b""
            await trio.sleep(self.delay_s)
            answer = self.answer(self.requests[-1], number)
            number += 1
            if answer is None:
                return
            await stream.send_all(answer)
            if b"connection: close" in answer:
                return


@asynccontextmanager
async def serving(server: Server):
    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(trio.serve_tcp, server.serve, 0)
        port = next(listener.socket.getsockname()[1] for listener in listeners if listener.socket.family == trio.socket.AF_INET)
        yield f"http://127.0.0.1:{port}"
        nursery.cancel_scope.cancel()


def run(main, server, *, transport=None, **options):
    """Run `main(client, url)` against `server`, within ten seconds. Returns the transport."""
    transport = transport or PooledTransport(**options)

    async def everything():
        with trio.fail_after(10):
            async with serving(server) as url, trio_client(transport=transport) as client:
                await main(client, url)

    trio.run(everything)
    return transport


def test_requests_one_after_the_other_share_a_connection():
    async def main(client, url):
        for _ in range(5):
            assert (await client.post(url, content=b"x")).text == "ok"

    server = Server()
    transport = run(main, server)
    assert (server.connections, transport.open_connections) == (1, 0)


def test_headers_body_and_path_arrive_as_they_were_given():
    async def main(client, url):
        await client.post(url + "/a b?c=%20", content=b"body", headers={"X-Key": "v"})
        await client.get(url)

    server = Server()
    run(main, server)
    assert server.requests[0].startswith(b"POST /a%20b?c=%20 HTTP/1.1\r\n")
    assert b"X-Key: v\r\n" in server.requests[0]
    assert server.requests[0].endswith(b"\r\n\r\nbody")
    assert b"accept-encoding: identity" in server.requests[0].lower()
    assert server.requests[1].startswith(b"GET / HTTP/1.1\r\n")


def test_no_more_connections_are_open_than_allowed_and_requests_wait_for_theirs():
    async def main(client, url):
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(client.get, url)

    server = Server(delay_s=0.01)
    run(main, server, max_connections=4)
    assert (server.most_open, len(server.requests)) == (4, 20)


def test_the_bound_holds_over_several_servers_by_closing_idle_connections_of_others():
    first, second = Server(), Server()
    transport = PooledTransport(max_connections=2)

    async def main(client, url):
        async with serving(second) as other:
            for _ in range(3):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(client.get, url)
                    nursery.start_soon(client.get, url)
                assert transport.open_connections <= 2
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(client.get, other)
                    nursery.start_soon(client.get, other)
                assert transport.open_connections <= 2

    run(main, first, transport=transport)
    assert (len(first.requests), len(second.requests)) == (6, 6)


def test_the_connection_used_last_is_used_next_so_that_the_others_grow_old():
    async def main(client, url):
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(client.get, url)
        for _ in range(5):
            await client.get(url)

    numbers = []

    def answer(request, number):
        numbers.append(number)
        return OK

    run(main, Server(answer, delay_s=0.01))
    assert numbers == [0, 0, 0, 1, 2, 3, 4, 5]


def test_an_idle_connection_is_given_up_before_the_server_would_do_it():
    async def main(client, url):
        await client.get(url)
        await trio.sleep(0.15)
        await client.get(url)

    server = Server()
    run(main, server, keepalive_s=0.1)
    assert server.connections == 2


def test_an_idle_connection_that_the_server_closed_is_noticed_before_use():
    async def main(client, url):
        await client.get(url)
        await server.streams[0].aclose()
        await trio.sleep(0.01)
        assert (await client.post(url, content=b"x")).text == "ok"

    server = Server()
    run(main, server, replay_posts=False)
    assert (server.connections, len(server.requests)) == (2, 2)


def test_a_connection_that_dies_without_a_byte_of_the_response_is_replaced_once():
    async def main(client, url):
        await client.get(url)
        assert (await client.post(url, content=b"again")).text == "ok"

    server = Server(lambda request, number: OK if number == 0 else None)
    run(main, server)
    assert [request[-5:] for request in server.requests[1:]] == [b"again", b"again"]


def test_a_fresh_connection_that_dies_is_an_error_and_not_tried_again():
    async def main(client, url):
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post(url, content=b"x")

    server = Server(lambda request, number: None)
    run(main, server)
    assert len(server.requests) == 1


def test_posts_are_not_sent_again_where_the_client_was_made_so():
    async def main(client, url):
        await client.get(url)
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post(url, content=b"x")

    server = Server(lambda request, number: OK if number == 0 else None)
    run(main, server, replay_posts=False)
    assert len(server.requests) == 2


@pytest.mark.parametrize("begun", [b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\nconnection: close\r\n\r\nha", b"HTTP/1.1 200 OK\r\nconnection: close"])
def test_a_request_whose_response_has_begun_is_never_sent_again(begun):
    async def main(client, url):
        await client.get(url)
        with pytest.raises(httpx.RemoteProtocolError):
            await client.get(url)

    def answer(request, number):
        return OK if number == 0 else begun

    server = Server(answer)
    run(main, server)
    assert len(server.requests) == 2


def test_a_streamed_body_is_sent_and_not_sent_again():
    async def body():
        yield b"one"
        yield b"two"

    async def main(client, url):
        await client.post(url, content=body(), headers={"content-length": "6"})
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post(url, content=body(), headers={"content-length": "6"})

    server = Server(lambda request, number: OK if number == 0 else None)
    run(main, server)
    assert [request[-6:] for request in server.requests] == [b"onetwo", b"onetwo"]


def test_nobody_there_is_a_connect_error():
    async def main(client, url):
        with pytest.raises(httpx.ConnectError, match=r"127\.0\.0\.1:1"):
            await client.get("http://127.0.0.1:1")

    assert run(main, Server()).open_connections == 0


def test_a_body_over_its_cap_is_refused_by_its_length_and_by_its_bytes():
    chunked = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"a\r\n0123456789\r\n" * 20 + b"0\r\n\r\n"
    answers = iter([b"HTTP/1.1 200 OK\r\ncontent-length: 200\r\n\r\n" + b"x" * 200, chunked, OK])

    async def main(client, url):
        with pytest.raises(ResponseTooLarge, match="200 bytes exceeds the limit of 100"):
            await client.get(url)
        with pytest.raises(ResponseTooLarge, match="exceeds the limit of 100"):
            await client.get(url)
        assert (await client.get(url)).text == "ok"

    assert run(main, Server(lambda request, number: next(answers)), max_response_bytes=100).open_connections == 0


def test_a_compressed_body_is_refused_where_there_is_a_cap():
    async def main(client, url):
        with pytest.raises(ResponseTooLarge, match="compressed"):
            await client.get(url)

    run(main, Server(lambda request, number: b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 0\r\n\r\n"), max_response_bytes=100)


def test_a_cancelled_request_leaves_no_connection_and_gives_its_place_back():
    async def main(client, url):
        for _ in range(3):
            with trio.move_on_after(0.02):
                await client.get(url)
                raise AssertionError("expected no answer in time")
        assert transport.open_connections == 0
        server.delay_s = 0.0
        assert (await client.get(url)).text == "ok"

    server = Server(delay_s=0.1)
    transport = PooledTransport(max_connections=1)
    run(main, server, transport=transport)


def test_a_response_abandoned_half_way_closes_its_connection():
    async def main(client, url):
        async with client.stream("GET", url) as response:
            assert response.status_code == 200
        assert transport.open_connections == 0
        assert (await client.get(url)).status_code == 200

    transport = PooledTransport(max_connections=1)
    body = b"x" * 500_000
    run(main, Server(lambda request, number: b"HTTP/1.1 200 OK\r\ncontent-length: 500000\r\n\r\n" + body), transport=transport)


def test_a_connection_in_use_when_the_transport_is_closed_is_closed_when_it_comes_free():
    async def main(client, url):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.get, url)
            await trio.sleep(0.01)
            await transport.aclose()
            assert transport.open_connections == 1
        assert transport.open_connections == 0

    transport = PooledTransport()
    run(main, Server(delay_s=0.05), transport=transport)


def test_interim_responses_are_passed_over_and_empty_ones_are_whole():
    answers = iter([b"HTTP/1.1 103 Early Hints\r\n\r\n" + OK, b"HTTP/1.1 204 No Content\r\n\r\n", OK])

    async def main(client, url):
        assert (await client.get(url)).text == "ok"
        assert (await client.get(url)).status_code == 204
        assert (await client.head(url)).content == b""

    server = Server(lambda request, number: next(answers).replace(b"ok", b"" if request.startswith(b"HEAD") else b"ok"))
    run(main, server)
    assert server.connections == 1


@pytest.mark.parametrize(("kind", "error"), [("read", httpx.ReadTimeout), ("pool", httpx.PoolTimeout)])
def test_httpxs_own_timeouts_are_kept(kind, error):
    async def main(client, url):
        async with trio.open_nursery() as nursery:
            if kind == "pool":
                nursery.start_soon(client.get, url)
                await trio.sleep(0.01)
            with pytest.raises(error):
                await client.get(url, timeout=httpx.Timeout(None, **{kind: 0.02}))
            nursery.cancel_scope.cancel()

    run(main, Server(delay_s=1.0), max_connections=1)


def test_what_is_no_http_is_a_protocol_error():
    async def main(client, url):
        with pytest.raises(httpx.RemoteProtocolError):
            await client.get(url)
        with pytest.raises(httpx.UnsupportedProtocol):
            await client.get("ftp://127.0.0.1/")

    assert run(main, Server(lambda request, number: b"hello\r\n\r\n")).open_connections == 0


def test_tls_is_spoken_to_https_and_a_server_that_does_not_is_a_connect_error():
    class Plain(Server):
        async def _serve(self, stream):
            await stream.send_all(b"220 no TLS here\r\n")

    async def main(client, url):
        with pytest.raises(httpx.ConnectError, match=r"TLS with 127\.0\.0\.1 failed"):
            await client.get(url.replace("http://", "https://"))

    assert run(main, Plain(), ssl_context=ssl.create_default_context()).open_connections == 0


PLAIN = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-Kind: plain\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\no\r\n1\r\nk\r\n0\r\n\r\n"


def test_an_exchange_is_whole_bytes_in_both_directions_on_one_connection():
    async def main(client, url):
        first = await client.exchange("POST", url + "/a?b=c", b"body", {"X-Key": "v"})
        assert (first.status_code, first.content, first.text, first.headers[b"x-kind"]) == (200, b"ok", "ok", b"plain")
        assert (await client.exchange("POST", url + "/a?b=c", b"more body", {"X-Key": "v"})).content == b"ok"
        assert (await client.exchange("GET", url)).content == b"ok"
        assert (await client.post(url, content=b"x")).text == "ok"
        assert (await client.exchange("GET", url)).content == b"ok"

    server = Server(lambda request, number: PLAIN)
    assert run(main, server).open_connections == 0
    assert server.connections == 1
    head, _, body = server.requests[1].partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert (lines[0], body) == (b"POST /a?b=c HTTP/1.1", b"more body")
    assert {b"X-Key: v", b"content-length: 9"} <= set(lines)
    assert b"accept-encoding: identity" in head.lower()


@pytest.mark.parametrize(
    "answer",
    [
        CHUNKED,
        b"HTTP/1.1 103 Early Hints\r\n\r\n" + OK,
        b"HTTP/1.1 200 OK\r\nset-cookie: a\r\nset-cookie: b\r\ncontent-length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\ncontent-length: 2\n\nok",
        b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok",
        b"HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\n\r\nok",
    ],
    ids=["chunked", "interim", "a header twice", "bare newlines", "until the end", "HTTP/1.0", "an error"],
)
def test_an_exchange_reads_whatever_answer_http_allows(answer):
    async def main(client, url):
        for _ in range(3):
            assert (await client.exchange("POST", url, b"x")).content == b"ok"

    server = Server(lambda request, number: answer)
    assert run(main, server).open_connections == 0
    assert server.connections == (3 if b"connection: close" in answer else 1)


def test_an_answer_that_comes_byte_by_byte_is_whole():
    class Slow(Server):
        async def _serve(self, stream):
            await stream.receive_some()
            for number in range(len(PLAIN)):
                await stream.send_all(PLAIN[number : number + 1])
                await trio.lowlevel.checkpoint()

    async def main(client, url):
        assert (await client.exchange("POST", url, b"x")).content == b"ok"

    run(main, Slow())


def test_an_exchange_on_a_dead_connection_is_sent_again_once_and_a_begun_answer_never():
    answers = iter([OK, None, OK, b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nha", b"HTTP/1.1 200 OK\r\nconte"])

    async def main(client, url):
        assert (await client.exchange("POST", url, b"1")).content == b"ok"
        assert (await client.exchange("POST", url, b"2")).content == b"ok"
        for _ in range(2):
            with pytest.raises(httpx.RemoteProtocolError):
                await client.exchange("POST", url, b"3")

    class Ending(Server):
        async def _serve(self, stream):
            while await stream.receive_some():
                answer = next(answers)
                if answer is not None:
                    await stream.send_all(answer)
                if answer != OK:
                    return

    run(main, Ending())
    assert next(answers, None) is None


def test_bytes_after_an_answer_end_its_connection():
    async def main(client, url):
        for _ in range(2):
            assert (await client.exchange("POST", url, b"x")).content == b"ok"

    server = Server(lambda request, number: OK + b"HTTP/1.1 200 OK\r\n")
    run(main, server)
    assert server.connections == 2


def test_an_exchange_keeps_its_cap_and_takes_no_compressed_answer():
    answers = iter([b"HTTP/1.1 200 OK\r\ncontent-length: 200\r\n\r\n" + b"x" * 200, CHUNKED.replace(b"1\r\nk", b"80\r\n" + b"k" * 128), OK])

    async def main(client, url):
        for _ in range(2):
            with pytest.raises(ResponseTooLarge, match="exceeds the limit of 100"):
                await client.exchange("POST", url, b"x")
        assert (await client.exchange("POST", url, b"x")).content == b"ok"

    assert run(main, Server(lambda request, number: next(answers)), max_response_bytes=100).open_connections == 0

    async def compressed(client, url):
        with pytest.raises(httpx.RemoteProtocolError, match="gzip"):
            await client.exchange("POST", url, b"x")

    assert (
        run(compressed, Server(lambda request, number: b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 2\r\n\r\n..")).open_connections
        == 0
    )


def test_a_cancelled_exchange_leaves_no_connection_and_gives_its_place_back():
    async def main(client, url):
        for _ in range(3):
            with trio.move_on_after(0.02):
                await client.exchange("POST", url, b"x")
                raise AssertionError("expected no answer in time")
        assert transport.open_connections == 0
        server.delay_s = 0.0
        assert (await client.exchange("POST", url, b"x")).content == b"ok"

    server = Server(delay_s=0.1)
    transport = PooledTransport(max_connections=1)
    run(main, server, transport=transport)


def test_an_exchange_over_another_transport_is_a_request_as_any():
    async def main():
        transport = httpx.MockTransport(lambda request: httpx.Response(201, headers={"X-Body": request.content.decode()}, content=b"made"))
        async with trio_client(base_url="http://somewhere", transport=transport) as client:
            answer = await client.exchange("POST", "/path", b"asked", {"x-key": "v"})
        assert (answer.status_code, answer.content, answer.headers[b"x-body"]) == (201, b"made", b"asked")

    trio.run(main)
