"""Reading ahead: threads that ask the system for pages the next batches will touch.

They carry no data, so nothing that was read ahead can be lost, counted or left behind.

A page fault holds the GIL, and a thread that cannot have the GIL cannot read ahead: so while pages
come from disk, a job is given out only when its pages have been asked for, and those of the jobs
behind it with them. Where pages turn out to be in memory already, only a few samples of every 16th
job are tried, so that a warm cache costs next to nothing; the first that has to come from disk
brings everything back.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from types import TracebackType

import numpy as np
import numpy.typing as npt

from penstock.dataset.base import SampleDataset

if sys.platform == "linux":
    import resource

SELDOM = 16  # of this many jobs one is tried, where pages are in memory already
PROBE = 16  # and of that one so many samples


_Request = tuple[npt.NDArray[np.int64], threading.Event]


@dataclass(frozen=True, slots=True)
class Job:
    """Batches to be made together: where the first starts, how many, and all their samples."""

    position: int
    batches: int
    indices: npt.NDArray[np.int64]


class ReadAhead:
    """Walks jobs in order while `threads` threads advise on those up to `depth` jobs ahead.

    Leaving the `with` block ends the threads, however it is left.
    """

    def __init__(self, dataset: SampleDataset, threads: int, depth: int) -> None:
        self._dataset = dataset
        self._depth = depth if threads else 0
        self._queue: SimpleQueue[_Request | None] = SimpleQueue()
        self._every = 1
        self._failure: Exception | None = None
        self._leaving = False
        self._threads = [
            threading.Thread(target=self._work, name=f"penstock-read-ahead-{i}", daemon=True)
            for i in range(threads)
        ]

    def __enter__(self) -> ReadAhead:
        for thread in self._threads:
            thread.start()
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
        waiting: deque[tuple[Job, threading.Event | None]] = deque()
        ahead = 0
        for number, job in enumerate(jobs):
            asked = None
            if self._threads and number % self._every == 0:
                asked = threading.Event()
                few = job.indices if self._every == 1 else job.indices[:PROBE]
                self._queue.put((few, asked))
            waiting.append((job, asked))
            if len(waiting) > ahead:
                yield self._next(waiting)
                ahead = min(ahead + 1, self._depth)
        while waiting:
            yield self._next(waiting)

    def _next(self, waiting: deque[tuple[Job, threading.Event | None]]) -> Job:
        job, asked = waiting.popleft()
        if asked is not None and self._every == 1:
            asked.wait()
        if self._failure is not None:
            raise self._failure
        return job

    def _work(self) -> None:
        while (request := self._queue.get()) is not None:
            indices, asked = request
            try:
                if not self._leaving:
                    cold = self._advise(indices)
                    self._every = 1 if cold else min(self._every * 2, SELDOM)
            except Exception as error:  # noqa: BLE001 - the consumer raises it in `_next`
                self._failure = error
            finally:
                asked.set()

    def _advise(self, indices: npt.NDArray[np.int64]) -> bool:
        """Have samples read; whether any had to be, as far as can be told.

        The kernel counts what a thread has it read. Where it does not (some network file systems),
        asking again tells: pages that are there by then are asked for in half the time.
        """
        global _kernel_counts  # noqa: PLW0603 - a fact about the machine, found once
        blocks, start = _blocks_read(), time.thread_time_ns()
        self._dataset.advise(indices)
        once = time.thread_time_ns()
        if _blocks_read() > blocks:
            _kernel_counts = True
            return True
        if _kernel_counts:
            return False
        self._dataset.advise(indices)
        return once - start > 2 * (time.thread_time_ns() - once)


_kernel_counts = False  # whether a count of blocks has ever moved here


def _blocks_read() -> int:
    if sys.platform != "linux":
        return 0
    return resource.getrusage(resource.RUSAGE_THREAD).ru_inblock
