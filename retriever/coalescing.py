"""Many callers, few requests: what waits while requests are on their way goes out together in the next.

    coalescer = Coalescer(ask, requests=2)
    [passages] = await coalescer.get(["capital of Norway"], topk=3)

There is no timer and no task of its own: of those that wait one leads, takes what waits for a request, of its own and of others, asks, and hands
the answers out. Equal queries that wait or are on their way are asked once.

    A leader that is cancelled or whose deadline passes      what it took waits again, first in line, and another one leads
    A request that fails                                     each caller asks again on its own, and gets its own answer or error

So nobody gets an error, or no answer, for what somebody else asked or did.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

import trio

from retriever.passage import RetrieverError

__all__ = ["Coalescer"]

MAX_QUERIES = 256  # of a request: a server's batch
TURNS = 2  # of trio's loop: callers that were answered together wake in the first, in any order, ask again, and come along
MAX_CHARACTERS = 128 * 1024  # of a request: at most 12 bytes each in JSON, so that it stays below a server's 2 MB

Answer = TypeVar("Answer")


class Coalescer(Generic[Answer]):
    """Asks for the queries of many trio tasks in few requests.

    Args:
        ask: one request, for so many passages a query: as many answers as queries, in their order. Bounded by its caller's deadline.
        requests: on their way at once; what else is asked waits.
        max_queries: of one request. A caller's own, where they are more, go out in several.
    """

    def __init__(self, ask: Callable[[Sequence[str], int], Awaitable[Sequence[Answer]]], *, requests: int, max_queries: int = MAX_QUERIES) -> None:
        self._ask = ask
        self._free = requests
        self._max_queries = max_queries
        self._queue: deque[_Wish[Answer]] = deque()  # those no longer `waiting` are skipped
        self._open: dict[tuple[str, int], _Wish[Answer]] = {}  # waiting or on their way: equal queries join them

    async def get(self, queries: Sequence[str], *, topk: int) -> list[Answer]:
        """The answers to `queries`, in their order.

        Raises:
            RetrieverError: of a request that held queries of this caller alone.
        """
        caller = _Caller()
        wishes = [self._wish(query, topk, caller) for query in queries]
        try:
            while missing := [wish for wish in wishes if wish.answer is None]:
                mine = next((wish for wish in missing if wish.waiting), None)
                if mine is not None and self._free:
                    await self._lead(mine, wishes)
                else:
                    await caller.woken()
        finally:
            self._leave(caller, wishes)
        return [wish.answer[0] for wish in wishes if wish.answer is not None]

    async def _lead(self, mine: _Wish[Answer], wishes: Sequence[_Wish[Answer]]) -> None:
        """Make one request, with `mine` in it."""
        taken: list[_Wish[Answer]] = []
        self._free -= 1
        try:
            for _ in range(TURNS):
                await trio.lowlevel.checkpoint()
            taken = self._take(mine, wishes)
            self._wake_next()
            answers = await self._ask([wish.query for wish in taken], mine.topk) if taken else ()
            self._hand_out(taken, answers)
        except RetrieverError:
            self._take_back(taken, alone=True)
            if all(wish in wishes for wish in taken):
                raise
        except BaseException:
            self._take_back(taken, alone=False)
            raise
        finally:
            self._free += 1
            self._wake_next()

    def _wish(self, query: str, topk: int, caller: _Caller) -> _Wish[Answer]:
        wish = self._open.get((query, topk))
        if wish is None:
            wish = self._open[query, topk] = _Wish(query, topk)
            self._queue.append(wish)
        wish.callers.append(caller)
        return wish

    def _take(self, mine: _Wish[Answer], wishes: Sequence[_Wish[Answer]]) -> list[_Wish[Answer]]:
        """What goes into a request with `mine`, from the front of the queue; nothing where somebody else took `mine` meanwhile."""
        taken: list[_Wish[Answer]] = []
        characters = 0
        if not mine.waiting:
            return taken
        for wish in (mine, *wishes) if mine.alone else (mine, *self._queue):
            if taken and (len(taken) == self._max_queries or characters + len(wish.query) > MAX_CHARACTERS):
                break
            if wish.waiting and wish.topk == mine.topk and (mine.alone or not wish.alone):
                wish.waiting = False
                taken.append(wish)
                characters += len(wish.query)
        while self._queue and not self._queue[0].waiting:
            self._queue.popleft()
        return taken

    def _hand_out(self, taken: Sequence[_Wish[Answer]], answers: Sequence[Answer]) -> None:
        for wish, answer in zip(taken, answers, strict=True):
            wish.answer = (answer,)
            self._close(wish)
            for caller in wish.callers:
                caller.wake()

    def _take_back(self, taken: Sequence[_Wish[Answer]], *, alone: bool) -> None:
        for wish in reversed([wish for wish in taken if wish.answer is None]):
            if wish.callers:
                wish.waiting = True
                wish.alone = wish.alone or alone
                self._queue.appendleft(wish)
            else:
                self._close(wish)

    def _leave(self, caller: _Caller, wishes: Sequence[_Wish[Answer]]) -> None:
        """What nobody waits for is not asked; what is on its way already may be joined until it comes."""
        for wish in wishes:
            wish.callers.remove(caller)
            if not wish.callers and wish.waiting:
                wish.waiting = False
                self._close(wish)
        self._wake_next()  # this caller may have been the one to lead

    def _close(self, wish: _Wish[Answer]) -> None:
        if self._open.get((wish.query, wish.topk)) is wish:
            del self._open[wish.query, wish.topk]

    def _wake_next(self) -> None:
        """The first in line that does not lead already may lead, where a request is free that nobody has been called to lead."""
        free = self._free
        for caller in (caller for wish in self._queue if wish.waiting for caller in wish.callers):
            free -= caller.called
            if free <= 0:
                return
            if caller.idle:
                caller.wake()
                return


class _Caller:
    """Somebody in `get`."""

    def __init__(self) -> None:
        self._called: trio.Event | None = None

    @property
    def idle(self) -> bool:
        """Whether it waits to be woken."""
        return self._called is not None and not self._called.is_set()

    @property
    def called(self) -> bool:
        """Whether it has been woken, and has not gone on yet."""
        return self._called is not None and self._called.is_set()

    async def woken(self) -> None:
        self._called = trio.Event()
        try:
            await self._called.wait()
        finally:
            self._called = None

    def wake(self) -> None:
        if self._called is not None:
            self._called.set()


class _Wish(Generic[Answer]):
    """A query that somebody, or several, want answered."""

    __slots__ = ("alone", "answer", "callers", "query", "topk", "waiting")

    def __init__(self, query: str, topk: int) -> None:
        self.query, self.topk = query, topk
        self.callers: list[_Caller] = []
        self.waiting = True  # for a request; then it is on its way, answered, or given up
        self.alone = False  # a request with others' queries failed: it goes with its caller's only
        self.answer: tuple[Answer] | None = None
