"""Stop anywhere, go on with other ranks, batches, threads: the rows stay the same ones.

What every run is compared with, bit for bit, is the list that one rank gives with one thread.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.stream.support import (
    CORPORA,
    PACKINGS,
    global_rows,
    make,
    rows_of,
    taken,
    through_json,
)

from penstock.stream import merge_states

ROWS = 420  # some four epochs of each corpus


@dataclass(frozen=True)
class Leg:
    """A stretch of a run in one set of processes."""

    world: int
    batches: int
    size: int = 1
    threads: int = 1
    close_after: int | None = None


@pytest.fixture(scope="session")
def undisturbed() -> dict[Any, list[Any]]:
    return {}


def reference(cache: dict[Any, list[Any]], path: Path, packing: str, shuffle: bool) -> list[Any]:
    key = path, packing, shuffle
    if key not in cache:
        with make(path, packing, shuffle=shuffle) as stream:
            cache[key] = taken(stream, ROWS)
            lanes = stream.state_dict()["lanes"].values()
        reached = [at[0][0] if packing == "best_fit_crop" else at[0] for at in lanes]
        assert min(reached) >= 2, "runs pass over ends of epochs"
    return cache[key]


def live(path: Path, packing: str, shuffle: bool, legs: list[Leg], expected: list[Any]) -> int:
    """Live a run leg by leg, each from the state of the one before; how many rows it came to."""
    state, row, before = None, 0, 0
    own: list[Any] = []
    for leg in legs:
        streams = [
            make(
                path,
                packing,
                shuffle=shuffle,
                rank=rank,
                world=leg.world,
                batch_size=leg.size,
                threads=leg.threads,
            )
            for rank in range(leg.world)
        ]
        if state is not None:
            for rank, stream in enumerate(streams):
                loaded = own[rank] if leg.world == before else state
                stream.load_state_dict(loaded)
                again = stream.state_dict()
                assert again["row"] == loaded["row"]
                assert again["step"] == loaded["step"]
                assert again["lanes"].items() <= loaded["lanes"].items()
        for number in range(leg.batches):
            if row + leg.world * leg.size > len(expected):
                break
            rows = global_rows(streams)
            assert rows == expected[row : row + len(rows)], (legs, row)
            row += len(rows)
            if number == leg.close_after:
                for stream in streams:
                    stream.close()
        own = [through_json(stream.state_dict()) for stream in streams]
        state, before = through_json(merge_states(own[::-1])), leg.world
        assert state["row"] == row
        assert list(state["lanes"]) == [str(lane) for lane in range(6)]
        for stream in streams:
            stream.close()
    return row


LEGS = st.lists(
    st.builds(
        Leg,
        world=st.sampled_from([1, 2, 3, 6]),
        batches=st.integers(0, 9),
        size=st.integers(1, 9),
        threads=st.integers(1, 3),
        close_after=st.none() | st.integers(0, 9),
    ),
    min_size=2,
    max_size=6,
)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("name", CORPORA)
@settings(max_examples=3, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(legs=LEGS, shuffle=st.booleans())
def test_a_run_stopped_anywhere_goes_on_the_same_on_any_number_of_ranks(
    corpora: dict[str, Path],
    undisturbed: dict[Any, list[Any]],
    name: str,
    packing: str,
    legs: list[Leg],
    shuffle: bool,
) -> None:
    expected = reference(undisturbed, corpora[name], packing, shuffle)
    live(corpora[name], packing, shuffle, legs, expected)


@pytest.mark.long
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("name", CORPORA)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(legs=LEGS, shuffle=st.booleans())
def test_many_runs_stopped_anywhere_go_on_the_same(
    corpora: dict[str, Path],
    undisturbed: dict[Any, list[Any]],
    name: str,
    packing: str,
    legs: list[Leg],
    shuffle: bool,
) -> None:
    expected = reference(undisturbed, corpora[name], packing, shuffle)
    live(corpora[name], packing, shuffle, legs, expected)


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_run_of_many_legs_passes_over_ends_of_epochs(
    corpora: dict[str, Path], undisturbed: dict[Any, list[Any]], packing: str
) -> None:
    legs = [
        Leg(world=2, batches=9, size=5),
        Leg(world=6, batches=7, threads=2),
        Leg(world=1, batches=5, size=7, close_after=2),
        Leg(world=3, batches=10, size=3, threads=3),
        Leg(world=3, batches=10, size=1),
        Leg(world=6, batches=3, size=2),
        Leg(world=1, batches=9, size=9),
    ]
    expected = reference(undisturbed, corpora["mixed"], packing, True)
    assert live(corpora["mixed"], packing, True, legs, expected) > 400


@pytest.mark.parametrize("packing", PACKINGS)
def test_every_sixth_state_of_a_run_goes_on_the_same(
    corpora: dict[str, Path], undisturbed: dict[Any, list[Any]], packing: str
) -> None:
    path = corpora["parquet"]
    expected = reference(undisturbed, path, packing, True)
    with make(path, packing) as stream:
        states = [stream.state_dict()]
        for row in expected[:130]:
            assert taken(stream, 1) == [row]
            states.append(through_json(stream.state_dict()))
    with make(path, packing, batch_size=4) as again:
        for row, state in list(enumerate(states))[::6]:
            again.load_state_dict(state)
            assert again.state_dict() == state
            assert rows_of(again.next_batch()) == expected[row : row + 4], row
            again.load_state_dict(state)
            assert again.state_dict() == state


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_state_is_of_the_last_batch_delivered_and_is_nobodys_but_its_takers(
    corpora: dict[str, Path], undisturbed: dict[Any, list[Any]], packing: str
) -> None:
    expected = reference(undisturbed, corpora["jsonl"], packing, True)
    with make(corpora["jsonl"], packing, threads=3) as stream:
        taken(stream, 50)
        state = stream.state_dict()
        assert stream.state_dict() == state
        kept = through_json(state)
        assert taken(stream, 30) == expected[50:80]
        assert state == kept
        stream.load_state_dict(state)
        spoil(state["lanes"])
        spoil(stream.state_dict()["lanes"])
        assert stream.state_dict() == kept
        assert taken(stream, 30) == expected[50:80]


def spoil(value: Any) -> None:
    """Change each list that is found, as someone might who owns it."""
    for each in value.values() if isinstance(value, dict) else value:
        if isinstance(each, list):
            spoil(each)
            each.append(99)


def test_iterating_twice_goes_on_and_steps_end_a_stream(
    corpora: dict[str, Path], undisturbed: dict[Any, list[Any]]
) -> None:
    expected = reference(undisturbed, corpora["gzip"], "chunked", True)
    with make(corpora["gzip"], steps=7) as stream:
        rows = []
        for batch in stream:
            rows += rows_of(batch)
            if stream.step == 3:
                break
        state = stream.state_dict()
        for batch in stream:
            rows += rows_of(batch)
        assert rows == expected[:7]
        assert list(stream) == []
        stream.load_state_dict(state)
        assert len(list(stream)) == 4
        assert stream.stats()["batches"] == 4


def test_without_documents_apart_batches_hold_inputs_and_labels(
    corpora: dict[str, Path],
) -> None:
    packed = make(corpora["list"], batch_size=4)
    plain = make(corpora["list"], batch_size=4, pack_sequences=False)
    with packed, plain:
        for _ in range(20):
            both, whole = plain.next_batch(), packed.next_batch()
            assert list(both) == ["input_ids", "labels"]
            assert all(both[key].equal(whole[key]) for key in both)


def test_batches_at_a_device_are_the_same(corpora: dict[str, Path]) -> None:
    here, there = (make(corpora["list"], batch_size=4, device=name) for name in (None, "cpu"))
    with here, there:
        for _ in range(20):
            assert rows_of(here.next_batch()) == rows_of(there.next_batch())


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_fork_in_mid_stream_goes_on_in_both_processes(
    corpora: dict[str, Path], undisturbed: dict[Any, list[Any]], packing: str, tmp_path: Path
) -> None:
    """Also where a thread of the parent is in the middle of something, holding locks."""
    expected = reference(undisturbed, corpora["parquet"], packing, True)
    with make(corpora["parquet"], packing, threads=3) as stream:
        for row in range(1, 60, 12):
            assert taken(stream, 12) == expected[row - 1 : row + 11]
            child = os.fork()
            if not child:
                good = taken(stream, 20) == expected[row + 11 : row + 31]
                good = good and stream.state_dict()["row"] == row + 31
                del stream
                os._exit(0 if good else 1)
            assert os.waitpid(child, 0)[1] == 0
