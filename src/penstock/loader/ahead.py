"""Reading ahead: threads that ask the system for pages the next batches will touch.

They carry no data, so nothing that was read ahead can be lost, counted or left behind.

Whether it is worth it, the consumer's own clock tells: a job that is gathered without help and is
slow means that pages come from disk, and from then on every job is asked for `depth` jobs ahead.
Now and then one is left alone as a control; when that is fast, pages are in memory and the threads
rest. So a warm cache costs nothing, on any file system.

A page fault holds the GIL, and a thread that cannot have the GIL cannot read ahead: so a job that
was asked for is given out only when its pages have been requested.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from types import TracebackType

import numpy as np
import numpy.typing as npt

from penstock.dataset.base import SampleDataset

# From memory a sample takes about 1 µs and 0.1 ns a byte, from the fastest disk 50 µs.
SLOW_SAMPLE, SLOW_BYTE = 15e-6, 0.5e-9
FIRST_CONTROL, LAST_CONTROL = 8, 512  # jobs from one control to the next: more each time


@dataclass(frozen=True, slots=True)
class Job:
    """Batches to be made together: where the first starts, how many, and all their samples."""

    position: int
    batches: int
    indices: npt.NDArray[np.int64]


class _Waiting:
    """A job on its way, and whether its pages have been requested."""

    __slots__ = ("asked", "job")

    def __init__(self, job: Job) -> None:
        self.job = job
        self.asked: threading.Event | None = None


class ReadAhead:
    """Walks jobs in order while up to `threads` threads ask for those up to `depth` jobs ahead.

    Leaving the `with` block ends the threads, however it is left.
    """

    def __init__(self, dataset: SampleDataset, threads: int, depth: int) -> None:
        self._dataset = dataset
        self._depth = depth if threads else 0
        self._count = threads
        self._queue: SimpleQueue[_Waiting | None] = SimpleQueue()
        self._waiting: deque[_Waiting] = deque()
        self._threads: list[threading.Thread] = []
        self._reading = False
        self._helped = False  # whether the job given out last was asked for
        self._control = FIRST_CONTROL
        self._until_control = 0
        self._failure: Exception | None = None
        self._leaving = False

    def __enter__(self) -> ReadAhead:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._leaving = True
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def walk(self, jobs: Iterator[Job]) -> Iterator[Job]:
        """The jobs in order; the stretch ahead grows by one a step: the first waits for nothing."""
        ahead = 0
        for job in jobs:
            self._waiting.append(_Waiting(job))
            if self._reading:
                self._ask(self._waiting[-1])
            if len(self._waiting) > ahead:
                yield self._next()
                ahead = min(ahead + 1, self._depth)
        while self._waiting:
            yield self._next()

    def gathered(self, job: Job, seconds: float) -> None:
        """Note how long the job given out last took to gather."""
        if not self._depth or self._helped:
            return
        samples = len(job.indices)
        slow = seconds > samples * (SLOW_SAMPLE + SLOW_BYTE * self._dataset.sample_bytes)
        if slow and not self._reading:
            self._control = FIRST_CONTROL
        elif slow:
            self._control = min(self._control * 2, LAST_CONTROL)
        self._reading, self._until_control = slow, self._control
        if slow:
            for waiting in self._waiting:
                if waiting.asked is None:
                    self._ask(waiting)

    def _ask(self, waiting: _Waiting) -> None:
        self._until_control -= 1
        if self._until_control < 0:
            self._until_control = self._control + self._depth  # until this one has been measured
            return
        if not self._threads:
            self._threads = [
                threading.Thread(target=self._work, name=f"penstock-read-ahead-{i}", daemon=True)
                for i in range(self._count)
            ]
            for thread in self._threads:
                thread.start()
        waiting.asked = threading.Event()
        self._queue.put(waiting)

    def _next(self) -> Job:
        waiting = self._waiting.popleft()
        self._helped = waiting.asked is not None
        if waiting.asked is not None:
            waiting.asked.wait()
        if self._failure is not None:
            raise self._failure
        return waiting.job

    def _work(self) -> None:
        while (waiting := self._queue.get()) is not None:
            assert waiting.asked is not None
            try:
                if not self._leaving:
                    self._dataset.advise(waiting.job.indices)
            except Exception as error:  # noqa: BLE001 - the consumer raises it in `_next`
                self._failure = error
            finally:
                waiting.asked.set()
