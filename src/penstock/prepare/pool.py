"""Worker processes: each opens its own tokenizer, makes parts, and ends when its parent does.

They are spawned, since a tokenizer that was inherited over a fork can hang. One that dies is an
error that says so; its work has no completion mark and is done again on the next run.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import TYPE_CHECKING, Any

from penstock.errors import DataError, PenstockError

if TYPE_CHECKING:
    from penstock.prepare.plan import Work
    from penstock.prepare.worker import Task, Worker
    from penstock.text.tokenizer import FileTokenizer, Whole

Note = Callable[[int, dict[str, Any]], None]
Answer = dict[str, Any] | PenstockError


class Pool:
    """`count` processes that do works; with 0, they are done here.

    They start at once and import what they need while the task is still being made.
    """

    def __init__(self, count: int) -> None:
        self._here: Worker | None = None
        self._tokenizer: FileTokenizer | None = None
        self._processes: list[tuple[Any, Connection]] = []
        self.resize(count)

    def __enter__(self) -> Pool:
        return self

    @property
    def count(self) -> int:
        """How many processes there are."""
        return len(self._processes)

    def resize(self, count: int) -> None:
        """Have so many processes; new ones are given the tokenizer, if there is one by now."""
        self._end(self._processes[count:], at_once=True)
        del self._processes[count:]
        context = multiprocessing.get_context("spawn")
        made = []
        with _deaf_to_ctrl_c():
            for _ in range(count - self.count):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs,), daemon=True)
                process.start()
                theirs.close()
                made.append((process, ours))
        self._processes += made
        if made and self._tokenizer is not None:
            _tell(made, self._tokenizer.whole())

    def restart(self, tokenizer: FileTokenizer) -> None:
        """As many new processes, for another tokenizer."""
        count, self._tokenizer = self.count, tokenizer
        self.resize(0)
        self.resize(count)

    def open(self, tokenizer: FileTokenizer) -> None:
        """Give the workers the tokenizer, to open it while the task is still being made."""
        self._tokenizer = tokenizer
        if self._processes:
            _tell(self._processes, tokenizer.whole())

    def begin(self, task: Task) -> None:
        """Tell the workers what all works have in common."""
        if self._processes:
            _tell(self._processes, task)
            return
        from penstock.prepare.worker import Worker  # noqa: PLC0415 - see _serve

        assert self._tokenizer is not None, "open() comes first"
        self._here = Worker(task, self._tokenizer)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end(self._processes, at_once=kind is not None)

    @staticmethod
    def _end(processes: Sequence[tuple[Any, Connection]], *, at_once: bool) -> None:
        for process, pipe in processes:
            pipe.close()  # an idle worker ends at this
            if at_once:
                process.terminate()
        for process, _ in processes:
            process.join()

    def run(self, works: Sequence[Work], note: Note, limit: int | None = None) -> None:
        """Do all works, telling `note` of each when it is done; the first that fails ends it."""

        def told(work: Work, answer: Answer) -> None:
            if isinstance(answer, PenstockError):
                raise answer
            note(work.number, answer)

        self.tried(works, told, limit)

    def tried(
        self, works: Sequence[Work], told: Callable[[Work, Answer], None], limit: int | None
    ) -> None:
        """Do all works, telling of each how it ended: its completion mark, or its error."""
        if self._here is not None:
            for work in works:
                told(work, _outcome(self._here, work, limit))
            return
        waiting = deque(works)
        busy: dict[Connection, tuple[Any, Work]] = {}
        idle = list(self._processes)
        while waiting or busy:
            while waiting and idle:
                process, pipe = idle.pop()
                work = waiting.popleft()
                _send(process, pipe, (work, limit))
                busy[pipe] = process, work
            for ready in wait(list(busy)):
                assert isinstance(ready, Connection)
                process, work = busy.pop(ready)
                told(work, _answer(process, ready))
                idle.append((process, ready))


def _tell(processes: Sequence[tuple[Any, Connection]], message: Whole | Task) -> None:
    for process, pipe in processes:
        _send(process, pipe, message)


def _send(process: Any, pipe: Connection, message: Any) -> None:
    try:
        pipe.send(message)
    except OSError:
        raise _died(process) from None


def _answer(process: Any, pipe: Connection) -> Answer:
    try:
        answer: Answer = pipe.recv()
    except (EOFError, ConnectionError):
        raise _died(process) from None
    return answer


def _outcome(worker: Worker, work: Work, limit: int | None) -> Answer:
    """A work done, or why it could not be."""
    try:
        return worker.run(work, limit)
    except PenstockError as error:
        return error
    except OSError as error:
        return said(error)


def _died(process: Any) -> DataError:
    process.join(5)
    code = process.exitcode
    how = f"ended with code {code}"
    if code is not None and code < 0:
        how = f"was killed by {signal.Signals(-code).name}"
    hint = " (the kernel kills what takes too much memory)" if code == -signal.SIGKILL else ""
    return DataError(
        f"a worker {how}{hint}: what is complete is kept, so run the same command again, with "
        "fewer --workers if memory is short"
    )


def _serve(pipe: Connection) -> None:
    """A worker's life: the tokenizer, the task, then works in and completion marks out."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    # Not at the top: this process imports it while its parent does, not before that starts it.
    from penstock.prepare.worker import Worker  # noqa: PLC0415

    def received() -> Any:
        try:
            return pipe.recv()
        except (EOFError, ConnectionError):
            os._exit(0)  # at once: what is done is on disk, and large caches take long to free

    tokenizer = received().open()
    with suppress(PenstockError):  # met again, and told, with the first text
        tokenizer.warm_up()
    task, worker = received(), None
    while True:
        work, limit = received()
        try:
            worker = worker or Worker(task, tokenizer)
            answer: Answer = _outcome(worker, work, limit)
        except PenstockError as error:  # the recipe and the tokenizer do not go together
            answer = error
        try:
            pipe.send(answer)
        except OSError:
            return


@contextmanager
def _deaf_to_ctrl_c() -> Iterator[None]:
    """While workers are started, who are to leave Ctrl-C to their parent from the very first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def said(error: OSError) -> DataError:
    """What the system refused, in words."""
    where = f"{error.filename}: " if error.filename else ""
    return DataError(
        f"{where}{error.strerror or error}: what is complete is kept; mend this and run the same "
        "command again"
    )


def _end_with_parent(parent: int) -> None:
    """A worker whose parent was killed has nobody to tell: it ends at once."""
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)
