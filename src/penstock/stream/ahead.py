"""Threads that make what lanes need next: read, tokenize, pack; ahead of the consumer.

    >>> ahead = Ahead(threads=2, most=6)
    >>> ahead.want(7, when=0, make=lambda: "block")     # lane 7 will need it at row 0
    >>> ahead.take(7)
    'block'
    >>> _ = ahead.close()

What a lane needs is made by one thread at a time, in order. What is needed first is made first,
and no more than `most` wait to be taken. Nothing that waits here counts as delivered.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

Make = Callable[[], Any]
NOW = -1  # before all rows: somebody waits for it


class _Wanted:
    """One thing to be made, and what became of it."""

    __slots__ = ("done", "error", "make", "started", "value")

    def __init__(self, make: Make) -> None:
        self.make = make
        self.started = False
        self.done = threading.Event()
        self.value: Any = None
        self.error: BaseException | None = None


class _Shared:
    """What the threads and the consumer share; the threads keep nothing else alive."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.ready = threading.Condition()
        self.heap: list[tuple[int, int]] = []  # (when, lane)
        self.wanted: dict[int, _Wanted] = {}
        self.out = 0  # started, and not yet taken
        self.closed = False
        self.threads: list[threading.Thread] = []
        self.pid = os.getpid()

    def work(self) -> None:
        """A thread's life."""
        while (wanted := self._next()) is not None:
            try:
                wanted.value = wanted.make()
            except BaseException as error:  # noqa: BLE001 - raised by `take`, in the consumer
                wanted.error = error
            wanted.done.set()
            del wanted  # it may hold megabytes, and this thread may wait for long

    def _next(self) -> _Wanted | None:
        with self.ready:
            while True:
                while not self.closed and not self._may_start():
                    self.ready.wait()
                if self.closed:
                    return None
                _, lane = heappop(self.heap)
                wanted = self.wanted.get(lane)
                if wanted is not None and not wanted.started:  # else it was hurried before
                    wanted.started = True
                    self.out += 1
                    return wanted

    def _may_start(self) -> bool:
        return bool(self.heap) and (self.out < self.most or self.heap[0][0] == NOW)

    def close(self) -> None:
        """Let the threads end, and wait for them: none may be left when the interpreter ends."""
        if self.pid != os.getpid():
            return  # a forked child has no such threads, and one of them may have held the lock
        with self.ready:
            self.closed = True
            self.ready.notify_all()
        for thread in self.threads:
            if thread is not threading.current_thread():
                thread.join()


class Ahead:
    """Makes at most one thing for each lane at a time."""

    def __init__(self, threads: int, most: int) -> None:
        self._count, self._shared = threads, _Shared(most)
        self.close = weakref.finalize(self, self._shared.close)  # at the latest when Python ends

    @property
    def alive(self) -> bool:
        """Whether there are threads here: not after `close`, nor in a forked child."""
        return not self._shared.closed and not self.forked

    @property
    def forked(self) -> bool:
        """Whether the threads are those of a parent process."""
        return self._shared.pid != os.getpid()

    def want(self, lane: int, *, when: int, make: Make) -> None:
        """Have something made for a lane, which will take it at row `when`."""
        shared = self._shared
        with shared.ready:
            assert lane not in shared.wanted, "one thing a lane at a time"
            shared.wanted[lane] = _Wanted(make)
            heappush(shared.heap, (when, lane))
            if len(shared.threads) < self._count:
                thread = threading.Thread(target=shared.work, name="penstock-ahead", daemon=True)
                shared.threads.append(thread)
                thread.start()
            shared.ready.notify()

    def take(self, lane: int) -> Any:
        """What was wanted for a lane, when it is made; its error is raised here."""
        shared = self._shared
        with shared.ready:
            assert not shared.closed
            wanted = shared.wanted[lane]
            if not wanted.started:
                heappush(shared.heap, (NOW, lane))
                shared.ready.notify()
        wanted.done.wait()
        with shared.ready:
            del shared.wanted[lane]
            shared.out -= 1
            shared.ready.notify()
        if wanted.error is not None:
            raise wanted.error
        return wanted.value
