"""What is made ahead: bounded, in order, its errors where they are due, and gone in the end."""

from __future__ import annotations

import gc
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.stream.support import (
    PACKINGS,
    documents,
    lines,
    make,
    rows_of,
    soon,
    taken,
    threads_of_ours,
    through_json,
    write_parquet,
)
from tests.text.tokenizers_for_tests import gpt2_like

from penstock import batch as batches
from penstock.errors import DataError
from penstock.stream import TextStream
from penstock.stream.ahead import Ahead
from penstock.stream.lanes import ChunkLane

ROOT = Path(__file__).parents[2]


# --- Ahead


class Works:
    """Things to make that wait until they are let through, and what was begun."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.gate = threading.Event()

    def want(self, ahead: Ahead, lane: int, when: int) -> None:
        def make() -> int:
            self.begun.append(lane)
            self.gate.wait()
            return lane * 10

        ahead.want(lane, when=when, make=make)


def test_no_more_than_so_many_wait_and_what_is_needed_first_is_made_first() -> None:
    works, ahead = Works(), Ahead(threads=2, most=4)
    works.want(ahead, 99, 0)
    assert soon(lambda: works.begun == [99])  # one thread is busy
    works.want(ahead, 98, 0)
    assert soon(lambda: works.begun == [99, 98])  # and the other
    for lane in range(20):
        works.want(ahead, lane, 100 - lane)
    works.gate.set()
    assert soon(lambda: len(works.begun) == 4)
    assert all(ahead._shared.wanted[lane].done.wait(60) for lane in works.begun)
    assert sorted(works.begun[2:]) == [18, 19], "the first two that are due"
    assert ahead.take(3) == 30, "what is asked for now is made now, though enough wait"
    assert len(works.begun) == 5
    assert ahead.take(19) == 190
    assert soon(lambda: len(works.begun) == 6)
    assert works.begun[-1] == 17
    ahead.close()
    assert len(works.begun) == 6
    assert not ahead.alive
    assert threads_of_ours() == []


def test_whatever_the_order_all_is_made_once_and_given_to_its_lane() -> None:
    luck = random.Random(1)
    ahead = Ahead(threads=3, most=5)
    made: list[tuple[int, int]] = []
    turn = dict.fromkeys(range(8), 0)
    for lane in turn:
        ahead.want(lane, when=lane, make=lambda at=(lane, 0): made.append(at) or at)
    for _ in range(800):
        lane = luck.randrange(8)
        assert ahead.take(lane) == (lane, turn[lane])
        assert ahead._shared.out <= 5 + 1
        turn[lane] += 1
        at = lane, turn[lane]
        ahead.want(lane, when=luck.randrange(100), make=lambda at=at: made.append(at) or at)
    assert len(made) == len(set(made)) <= 808
    ahead.close()


def test_an_error_is_raised_where_it_is_taken() -> None:
    ahead = Ahead(threads=1, most=3)

    def fail() -> None:
        raise DataError("bad")

    ahead.want(0, when=5, make=fail)
    ahead.want(1, when=6, make=lambda: "good")
    assert ahead.take(1) == "good"
    with pytest.raises(DataError, match="bad"):
        ahead.take(0)
    ahead.close()


# --- errors


def write_with_bad(folder: Path, bad: int) -> Path:
    """Eight units of ten documents, of which one has a bad one."""
    folder.mkdir()
    for number in range(8):
        raw = lines(documents(10, seed=number, first=10 * number, empty=0))
        if number == bad:
            raw = raw.replace(b'"text"', b'"texd"', 1)
        (folder / f"{number}.jsonl").write_bytes(raw)
    return folder


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("size", [1, 7])
def test_a_bad_document_is_an_error_at_the_batch_that_needs_it_and_not_before(
    tmp_path: Path, packing: str, size: int
) -> None:
    path = write_with_bad(tmp_path / "data", bad=4)
    reached = []
    for threads in (1, 4):
        stream = make(path, packing, lanes=1, shuffle=False, threads=threads, batch_size=size)
        rejecting = make(
            path, packing, lanes=1, shuffle=False, policy="reject", batch_size=size, threads=threads
        )
        with stream, rejecting:
            assert len(stream.corpus.units) == 8
            expected = [rows_of(rejecting.next_batch()) for _ in range(160 // size)]
            delivered, state, error = until_an_error(stream, expected)
            assert re.search(r"4\.jsonl, line 1 .*no field 'text'", error)
            ledger = stream.stats()["ledger"]
            reached.append(delivered)
            assert stream.state_dict() == state, "that of the last batch delivered"
            assert stream.step == delivered == stream.stats()["batches"]
            assert ledger["rows"] == delivered * size
            with pytest.raises(DataError, match=r"4\.jsonl, line 1"):
                stream.next_batch()
            assert stream.state_dict() == state
            if packing == "chunked" and size == 1:
                assert state["lanes"]["0"] == [0, 3, 1, 0], "all of the units before it"
        with make(path, packing, lanes=1, shuffle=False, policy="reject", batch_size=size) as again:
            again.load_state_dict(state)
            for batch in expected[delivered:]:
                assert rows_of(again.next_batch()) == batch
    assert reached[0] == reached[1] > 1


def until_an_error(stream: TextStream, expected: list[Any]) -> tuple[int, Any, str]:
    """How many batches came as expected, the state after them, and the error."""
    state = stream.state_dict()
    for delivered, batch in enumerate(expected):
        try:
            found = rows_of(stream.next_batch())
        except DataError as error:
            return delivered, state, str(error)
        assert found == batch
        state = through_json(stream.state_dict())
    raise AssertionError("no error came")


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_batch_that_could_not_be_made_comes_again(
    corpora: dict[str, Path], monkeypatch: pytest.MonkeyPatch, packing: str
) -> None:
    real = batches.Windows.batch
    failing = False

    def sometimes(self: Any, *args: Any) -> Any:
        if failing:
            raise torch.OutOfMemoryError("no room")
        return real(self, *args)

    monkeypatch.setattr(batches.Windows, "batch", sometimes)
    stream, whole = (make(corpora["mixed"], packing, batch_size=9, threads=2) for _ in range(2))
    with stream, whole:
        for number in range(12):
            state = through_json(stream.state_dict())
            ledger = stream.stats()["ledger"]
            if failing := number % 3 == 1:
                with pytest.raises(torch.OutOfMemoryError):
                    stream.next_batch()
                failing = False
                assert stream.state_dict() == state
                after = stream.stats()["ledger"]
                assert all(
                    after[key] == ledger[key] for key in ledger if key not in ("tokens", "waiting")
                )
            assert rows_of(stream.next_batch()) == rows_of(whole.next_batch())


def test_an_interrupt_in_the_middle_of_a_batch_loses_none_of_it(
    corpora: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = ChunkLane.row, 0

    def interrupted(self: Any, out: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 23:
            raise KeyboardInterrupt
        return real(self, out)

    with make(corpora["jsonl"], batch_size=7) as whole:
        expected = [rows_of(whole.next_batch()) for _ in range(6)]
        final = whole.state_dict()
    monkeypatch.setattr(ChunkLane, "row", interrupted)
    with make(corpora["jsonl"], batch_size=7) as stream:
        found = [rows_of(stream.next_batch()) for _ in range(3)]
        with pytest.raises(KeyboardInterrupt):
            stream.next_batch()
        assert stream.state_dict()["row"] == 21
        found += [rows_of(stream.next_batch()) for _ in range(3)]
        assert found == expected
        assert stream.state_dict() == final


# --- leaving


@pytest.mark.parametrize("packing", PACKINGS)
def test_close_and_forgetting_leave_no_thread_and_no_stream(
    corpora: dict[str, Path], packing: str
) -> None:
    stream = make(corpora["jsonl"], packing, threads=3)
    taken(stream, 10)
    assert threads_of_ours()
    stream.close()
    assert threads_of_ours() == []
    stream.close()
    taken(stream, 10)  # goes on
    assert threads_of_ours()
    seen = weakref.ref(stream)
    del stream
    gc.collect()
    assert seen() is None
    assert threads_of_ours() == []


def test_no_more_threads_than_were_asked_for(corpora: dict[str, Path]) -> None:
    for threads in (1, 3):
        with make(corpora["jsonl"], threads=threads) as stream:
            taken(stream, 50)
            assert len(threads_of_ours()) <= threads


SCRIPT = """
import os, sys
from penstock.stream import TextStream

stream = TextStream(
    {data!r}, {tokenizer!r}, 15, 4, lanes=6, threads=3, packing={packing!r}, buffer_size=9
)
for number, batch in enumerate(stream):
    if number == 30:
        break
"""


def run(script: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **options,
    )


def test_a_process_that_ends_with_a_stream_open_ends_in_silence(corpora: dict[str, Path]) -> None:
    """In a forked child, too, which ends as any process does."""
    script = SCRIPT.format(
        data=str(corpora["mixed"]), tokenizer=str(gpt2_like()), packing="chunked"
    )
    script += """
child = os.fork()
if not child:
    for _ in range(10):
        stream.next_batch()
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
iterator = iter(stream)
next(iterator)
"""
    ran = run(script)
    assert "Traceback" not in ran.stderr
    assert (ran.returncode, ran.stdout) == (0, "")
    assert [line for line in ran.stderr.splitlines() if "small for" not in line] == []


def test_ctrl_c_ends_a_stream_that_is_iterated(corpora: dict[str, Path]) -> None:
    script = SCRIPT.format(
        data=str(corpora["mixed"]), tokenizer=str(gpt2_like()), packing="best_fit_crop"
    )
    script += """
print("ready", flush=True)
for batch in stream:
    pass
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert errors.count("Traceback") == 1


# --- memory

MEMORY = """
import json, re
from pathlib import Path
from penstock.stream import TextStream

def peak():
    return int(re.search("VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1]) >> 10

stream = TextStream({data!r}, {tokenizer!r}, 2047, 1, lanes=2, threads=2, packing={packing!r})
before = peak()
for _ in range({rows}):
    stream.next_batch()
print(json.dumps([before, peak(), len(stream.corpus.units)]))
"""


@pytest.mark.long
@pytest.mark.parametrize("packing", PACKINGS)
def test_memory_does_not_follow_the_size_of_a_row_group(tmp_path: Path, packing: str) -> None:
    word = "".join(f"{n} words and {n * 7} more of them, " for n in range(400))
    path = write_parquet(
        tmp_path / "a.parquet",
        [f"{n} {word}" for n in range(45_000)],
        group=45_000,
        use_dictionary=False,
    )
    assert path.stat().st_size > 10_000_000
    script = MEMORY.format(data=str(path), tokenizer=str(gpt2_like()), packing=packing, rows=3000)
    ran = run(script, env=os.environ | {"PENSTOCK_CACHE_DIR": str(tmp_path / "cache")})
    assert ran.returncode == 0, ran.stderr
    before, after, units = json.loads(ran.stdout.splitlines()[-1])
    assert units > 8
    assert after - before < 350, "MiB, of a row group of 540 MiB"
