"""The loader over a stream: batches, steps, states and accounts as over stores."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.stream.numbered import (
    Numbering,
    batch_rows,
    everything,
    lengths,
    tokens_of,
    traced,
    write_numbered,
)

from penstock import (
    ConfigError,
    DataConfig,
    StatefulDataLoader,
    StateMismatch,
    TrainingPhase,
    merge_states,
)
from penstock.loader import streaming
from penstock.loader.streaming import StreamLoader
from penstock.stream import PassStream

T = 16
SIZES = [3 + size for size in lengths(90)]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_numbered(tmp_path / "d", SIZES, group=3)


def passes(folder: Path, **options: Any) -> PassStream:
    return PassStream(folder, Numbering(), T, **{"lanes": 12, "threads": 2, **options})


def load(folder: Path, batch_size: Any = 4, **options: Any) -> StatefulDataLoader:
    names = ("rank", "world_size", "lanes", "pack_sequences", "shuffle", "seed")
    own = {name: options.pop(name) for name in names if name in options}
    return StatefulDataLoader(passes(folder, **own), batch_size, **options)


def digests(batch: dict[str, Any]) -> list[list[int]]:
    return [tokens_of(row) for row in batch_rows(batch)]


def endless(loader: StatefulDataLoader) -> Iterator[Any]:
    while True:
        yield from loader


def in_json(state: Any) -> Any:
    return json.loads(json.dumps(state))


def test_an_epoch_is_a_pass_whose_last_batch_is_filled_from_the_next(folder: Path) -> None:
    loader = load(folder)
    assert isinstance(loader, StreamLoader)
    rows: list[Any] = []
    for epoch in range(3):
        for batch in loader:
            assert batch["input_ids"].shape == batch["labels"].shape == (4, T)
            rows += batch_rows(batch)
        assert loader.epoch == epoch + 1
        assert loader.state_dict()["batches_yielded"] == 0
    found, at_most = traced(rows, SIZES), everything(SIZES, 4)
    assert found >= everything(SIZES, 3)
    assert found <= at_most
    singles = [tokens_of(row) for stream in [passes(folder)] for _ in range(4) for row in stream]
    assert [tokens_of(row) for row in rows] == singles[: len(rows)]


@pytest.mark.parametrize("size", [1, 4, 7, 1000])
def test_a_finite_pass_ends_with_rows_that_have_no_labels(size: int, folder: Path) -> None:
    loader = load(folder, size, tail="pad", shuffle=False)
    count = len(list(passes(folder, shuffle=False)))
    for _ in range(2):
        batches = list(loader)
        assert {len(batch["labels"]) for batch in batches} == {size}
        rows = [row for batch in batches for row in batch_rows(batch)]
        assert traced(rows[:count], SIZES) == everything(SIZES)
        assert all((row["labels"] == -100).all() for row in rows[count:])
        assert len(rows) - count < size
    ledger = loader.stats()["ledger"]
    trained = sum(int((batch["labels"] != -100).sum()) for batch in batches)
    assert ledger["trained"] == 2 * trained
    assert ledger["delivered"] == 2 * sum(everything(SIZES).values())
    assert ledger["rows"] * (T + 1) == ledger["delivered"] + ledger["padding"]


def test_a_state_of_any_batch_goes_on_exactly(folder: Path) -> None:
    loader, batches = load(folder, 5, pack_sequences=True, rank=1, world_size=2), []
    states = [in_json(loader.state_dict())]
    for batch in itertools.islice(endless(loader), 30):
        batches.append(batch)
        states.append(in_json(loader.state_dict()))
    assert states[-1]["epoch"] >= 2
    for number, state in enumerate(states):
        again = load(folder, 5, pack_sequences=True, rank=1, world_size=2)
        again.load_state_dict(state)
        assert in_json(again.state_dict()) == state
        assert again.step == number
        for expected, found in zip(batches[number:], endless(again), strict=False):
            assert expected.keys() == found.keys() >= {"doc_ids", "cu_seqlens"}
            assert all(torch.equal(expected[k], found[k]) for k in ("labels", "doc_ids"))
    assert max(len(json.dumps(state)) for state in states) < 1500


def test_batch_sizes_and_ranks_may_change_at_any_batch(folder: Path) -> None:
    one, expected = passes(folder), []
    for row in one:
        expected.append(tokens_of(row))
        if one.opened().share.row > len(expected):
            break  # a lane has ended: from here on, ranks are apart
    assert len(expected) > 24
    luck = random.Random(4)
    for _ in range(5):
        state, done = None, 0
        while len(expected) - done > 12:
            world, size = luck.choice([(1, 3), (2, 3), (3, 1), (4, 2), (6, 1), (1, 7)])
            everyone = [load(folder, size, rank=r, world_size=world) for r in range(world)]
            if state is not None:
                for each in everyone:
                    each.load_state_dict(state)
            found = [digests(next(iter(each))) for each in everyone]
            rows = [row for rows in zip(*found, strict=True) for row in rows]
            assert rows == expected[done : done + len(rows)]
            done += len(rows)
            state = in_json(merge_states([each.state_dict() for each in everyone]))


def test_a_batch_size_schedule_goes_by_steps_and_outlives_a_restart(folder: Path) -> None:
    schedule = [(0, 2), (2, 5), (3, 1)]
    loader = load(folder, schedule, accumulation=2)
    sizes, states = [], []
    for batch in itertools.islice(loader, 9):
        sizes.append(len(batch["labels"]))
        states.append(in_json(loader.state_dict()))
    assert sizes == [2, 2, 2, 2, 5, 5, 1, 1, 1]
    for number, state in enumerate(states[:-1]):
        again = load(folder, schedule, accumulation=2)
        again.load_state_dict(state)
        assert again.step == (number + 1) // 2
        assert len(next(iter(again))["labels"]) == sizes[number + 1]


def test_a_step_keeps_its_number_when_accumulation_changes(folder: Path) -> None:
    loader = load(folder, accumulation=2)
    for _ in itertools.islice(loader, 7):
        pass
    assert loader.step == 3
    again = load(folder, accumulation=3)
    again.load_state_dict(in_json(loader.state_dict()))
    assert again.step == 4  # the one under way has ended
    for _ in itertools.islice(again, 3):
        pass
    assert again.step == 5


def test_lr_scale_is_that_of_the_step_last_delivered(folder: Path) -> None:
    phases = [TrainingPhase(start_step=2, lr_scale=0.5)]
    loader = load(folder, config=DataConfig(phases=phases), accumulation=2)
    scales = [loader.lr_scale]
    scales += [loader.lr_scale for _ in itertools.islice(loader, 6)]
    assert scales == [1.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0.5]


def test_an_epoch_that_was_broken_off_is_gone_on_with(folder: Path) -> None:
    expected = [digests(batch) for batch in load(folder)]
    loader = load(folder)
    found = [digests(batch) for batch in itertools.islice(loader, 3)]
    assert loader.state_dict()["batches_yielded"] == 3
    found += [digests(batch) for batch in loader]
    assert found == expected


def test_a_second_load_begins_from_there(folder: Path) -> None:
    loader = load(folder)
    start = in_json(loader.state_dict())
    first = [digests(batch) for batch in itertools.islice(loader, 5)]
    middle = in_json(loader.state_dict())
    rest = [digests(batch) for batch in loader]
    for state, expected in ((start, first), (middle, rest), (start, first)):
        loader.load_state_dict(state)
        assert loader.stats()["batches"] == 0
        assert [digests(b) for b in itertools.islice(loader, len(expected))] == expected
    batches = iter(loader)
    next(batches)
    loader.load_state_dict(middle)
    assert digests(next(batches)) == rest[0]
    assert loader.state_dict()["batches_yielded"] == middle["batches_yielded"] + 1


@pytest.mark.parametrize("world", [1, 2])
def test_a_state_of_the_documented_keys_loads_and_says_so(world: int, folder: Path) -> None:
    loader = load(folder, 4, rank=0, world_size=world)
    expected = [digests(batch) for batch in loader]
    state = {"epoch": 0, "batches_yielded": 3, "sampler": {"num_replicas": 1, "rank": 0}}
    again = load(folder, 2 * 4 // world // 2, rank=0, world_size=world)
    with pytest.warns(UserWarning, match="the rows of 3 batches of this loader's sizes"):
        again.load_state_dict(state)
    assert again.step == 3
    assert again.state_dict()["batches_yielded"] == 3
    if world == 1:
        assert [digests(batch) for batch in again] == expected[3:]
    else:  # of six rows three were each one's
        rows = [row for batch in expected for row in batch]
        assert digests(next(iter(again))) == rows[3:5]


def test_damaged_states_are_one_sentence_and_change_nothing(folder: Path) -> None:
    loader = load(folder)
    for _ in itertools.islice(loader, 3):
        pass
    good = in_json(loader.state_dict())
    documented = {"epoch": 0, "batches_yielded": 1, "sampler": {}}
    states: list[Any] = [None, [], {}, good | {"identity": {}}, good | {"lanes": {}}]
    for key in ("step", "batches_yielded", "batch_of_step", "row", "pass", "lanes", "version"):
        states += [good | {key: value} for value in (None, -1, "x", [[]], 1 << 70)]
    for key in documented:
        states += [documented | {key: value} for value in (-1, "x", [[]], 1 << 70)]
    states.append(documented | {"sampler": {"num_replicas": -2}})
    for state in states:
        with pytest.raises(StateMismatch) as error:
            loader.load_state_dict(state)
        assert "\n" not in str(error.value)
        assert in_json(loader.state_dict()) == good


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sampler": [1]}, "sampler cannot be had over a stream"),
        ({"collate_fn": list}, "collate_fn cannot be had over a stream"),
        ({"workers": "process"}, "workers='process' cannot be had over a stream"),
        ({"stages": [1]}, "stages cannot be had over a stream"),
        ({"workers": "threads"}, "workers is 'auto' or 'thread' over a stream, not 'threads'"),
        ({"tail": "cut"}, "tail is 'drop' or 'pad', not 'cut'"),
        ({"accumulation": 0}, "accumulation is a whole number >= 1"),
    ],
)
def test_what_a_stream_cannot_have_is_said(options: Any, words: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        load(folder, **options)


def test_a_stream_has_no_length_and_says_what_to_do(folder: Path) -> None:
    with pytest.raises(TypeError, match="train by steps"):
        len(load(folder))


def test_num_workers_are_threads_where_the_stream_names_none(folder: Path) -> None:
    stream = PassStream(folder, Numbering(), T, lanes=4)
    StatefulDataLoader(stream, 2, config=DataConfig(num_workers=3))
    assert stream.threads == 3
    stream = PassStream(folder, Numbering(), T, lanes=4, threads=1)
    StatefulDataLoader(stream, 2, config=DataConfig(num_workers=3))
    assert stream.threads == 1


def test_a_device_gets_the_batches(folder: Path) -> None:
    here, there = load(folder), load(folder, device="meta")
    for batch, moved in zip(itertools.islice(here, 2), there, strict=False):
        assert moved["labels"].device.type == "meta"
        assert moved["labels"].shape == batch["labels"].shape


def test_stats_count_what_was_delivered(folder: Path) -> None:
    loader = load(folder)
    batches = list(itertools.islice(loader, 6))
    stats = loader.stats()
    assert stats["batches"] == 6
    assert stats["tokens"] == 6 * 4 * T
    assert stats["tokens_per_second"] > 0
    ledger = stats["ledger"]
    assert ledger["trained"] == sum(int((batch["labels"] != -100).sum()) for batch in batches)
    assert ledger["rows"] * (T + 1) == ledger["delivered"] + ledger["padding"]
    assert ledger["tokens"] == ledger["delivered"] + ledger["waiting"]


def test_ranks_that_ended_passes_at_other_rows_agree(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[Any] = []
    monkeypatch.setattr(streaming, "check_ranks", lambda *found: said.append(found))
    everyone = [load(folder, 1, rank=rank, world_size=4, check_every=5) for rank in range(4)]
    for each in everyone:
        for _ in itertools.islice(endless(each), 40):
            pass
    assert len({each.position for each in everyone}) > 1
    assert said[:8] == said[8:16] == said[16:24] == said[24:]
    assert [at for at, _ in said[:8]] == [5, 10, 15, 20, 25, 30, 35, 40]
