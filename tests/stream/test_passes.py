"""A pass has every document once, whoever reads it and wherever it was stopped."""

from __future__ import annotations

import copy
import itertools
import json
import logging
import os
import pickle
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tests.stream.numbered import (
    EOS,
    Numbering,
    everything,
    lengths,
    tokens_of,
    traced,
    write_numbered,
)
from tests.text.server import serving
from torch.utils.data import DataLoader

from penstock import ConfigError, DataError, MissingData, PenstockError, StateMismatch, merge_states
from penstock.stream import PassStream
from penstock.stream.workers import PassTable

T = 16
FORKING = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "cache"))


def passes(folder: Path, **options: Any) -> PassStream:
    options = {"lanes": 24, "seed": 3, "threads": 2, **options}
    return PassStream(folder, Numbering(), T, **options)


def ranks(folder: Path, world: int, **options: Any) -> list[PassStream]:
    return [passes(folder, rank=rank, world_size=world, **options) for rank in range(world)]


def in_json(state: Any) -> Any:
    return json.loads(json.dumps(state))


def taken(rows: Iterator[Any], count: int) -> list[list[int]]:
    return [tokens_of(row) for row in itertools.islice(rows, count)]


# -------------------------------------------------------------------------------------- complete


@pytest.mark.parametrize(
    ("documents", "lanes", "world", "kind"),
    [
        (5, 240, 1, "parquet"),
        (5, 240, 8, "jsonl"),
        (60, 240, 3, "jsonl"),
        (60, 1, 1, "jsonl.gz"),
        (60, 6, 2, "jsonl.gz"),
        (60, 8, 4, "parquet"),
        (3000, 240, 2, "parquet"),
        (3000, 24, 8, "jsonl"),
    ],
)
def test_the_ranks_of_a_pass_have_every_document_once(
    documents: int, lanes: int, world: int, kind: str, tmp_path: Path
) -> None:
    sizes = lengths(documents)
    folder = write_numbered(tmp_path / "d", sizes, kind=kind)
    everyone = ranks(folder, world, lanes=lanes)
    orders = []
    for epoch in range(2):
        rows = [row for each in everyone for row in each]
        assert traced(rows, sizes) == everything(sizes)
        orders.append([tokens_of(row) for row in rows])
        assert {each.epoch for each in everyone} == {epoch + 1}
    if documents > 5:
        assert orders[0] != orders[1]


def test_a_row_is_seq_len_inputs_and_labels(tmp_path: Path) -> None:
    folder = write_numbered(tmp_path / "d", lengths(60))
    padded = 0
    for row in passes(folder, lanes=4):
        assert sorted(row) == ["input_ids", "labels"]
        assert row["input_ids"].shape == row["labels"].shape == (T,)
        assert row["input_ids"].dtype == row["labels"].dtype == torch.int64
        padded += len(tokens_of(row)) <= T
    assert padded <= 4


def test_the_same_seed_gives_the_same_passes_and_another_one_others(tmp_path: Path) -> None:
    folder = write_numbered(tmp_path / "d", lengths(60))
    found = []
    for seed, threads in ((3, 1), (3, 4), (4, 2)):
        stream = passes(folder, seed=seed, threads=threads)
        found.append([[tokens_of(row) for row in stream] for _ in range(2)])
    assert found[0] == found[1] != found[2]


def test_without_shuffling_documents_keep_their_order(tmp_path: Path) -> None:
    sizes = lengths(60)
    folder = write_numbered(tmp_path / "d", sizes)
    stream = passes(folder, lanes=1, shuffle=False)
    for _ in range(2):
        tokens = [token for row in stream for token in tokens_of(row) if token != EOS]
        assert tokens == list(range(1, sum(sizes) + 1))


def test_without_shuffling_all_passes_are_the_same(tmp_path: Path) -> None:
    """Where lanes and units have a common divisor, too: a validation loss is comparable."""
    folder = write_numbered(tmp_path / "d", [9] * 96, files=1, group=1)
    for world in (1, 2):
        for stream in ranks(folder, world, lanes=12, shuffle=False):
            first, *others = [[tokens_of(row) for row in stream] for _ in range(4)]
            assert others == [first] * 3


def test_a_batch_that_fails_before_any_row_can_be_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_numbered(tmp_path / "d", lengths(30))
    expected = [batch["labels"].tolist() for batch in passes(folder).batches(4)]
    stream = passes(folder)
    with monkeypatch.context() as patched:
        patched.setattr("penstock.stream.share.Ahead", None)
        with pytest.raises(TypeError):
            next(stream.batches(4))
    assert [batch["labels"].tolist() for batch in stream.batches(4)] == expected


def test_packed_rows_have_doc_ids_and_labels_that_cross_no_document(tmp_path: Path) -> None:
    sizes = lengths(60)
    folder = write_numbered(tmp_path / "d", sizes)
    plain, packed = passes(folder), passes(folder, pack_sequences=True)
    for row, apart in zip(plain, packed, strict=True):
        assert sorted(apart) == ["doc_ids", "input_ids", "labels"]
        assert torch.equal(row["input_ids"], apart["input_ids"])
        ended = row["input_ids"] == EOS  # EOS ends its own document
        document = ended.cumsum(0) - ended.long()
        used = len(tokens_of(row))
        assert apart["doc_ids"][:used].tolist() == document[:used].tolist()
        labels = row["labels"].masked_fill(ended, -100)
        assert torch.equal(apart["labels"], labels)


@pytest.mark.parametrize("shuffle", [True, False])
def test_where_one_document_has_tokens_others_ranks_passes_end_at_once(
    shuffle: bool, tmp_path: Path
) -> None:
    sizes = [0] * 17 + [5] + [0] * 14
    folder = write_numbered(tmp_path / "d", sizes, files=1, group=1)
    everyone = ranks(folder, 4, lanes=8, shuffle=shuffle)
    for _ in range(3):
        rows = [row for each in everyone for row in each]
        assert traced(rows, sizes) == everything(sizes)


@pytest.mark.parametrize("shuffle", [True, False])
def test_no_document_with_a_token_is_one_error_on_each_rank(shuffle: bool, tmp_path: Path) -> None:
    folder = write_numbered(tmp_path / "d", [0] * 30)
    for each in ranks(folder, 3, lanes=6, shuffle=shuffle):
        for _ in range(2):
            with pytest.raises(MissingData, match="holds no document with a token"):
                list(each)


def test_a_pass_reads_nothing_of_the_next_before_it_has_ended(tmp_path: Path) -> None:
    """Apart from what is read ahead: a validation pass would read some units twice."""
    folder = write_numbered(tmp_path / "d", [5] * 40, files=1, group=1)
    stream = passes(folder, lanes=40, threads=1)
    source = stream.opened().share.source
    read, units = [], source.parts

    def counted(unit: Any) -> Any:
        read.append(unit)
        return units(unit)

    source.parts = counted
    assert len(list(stream)) == 40
    stream.close()
    assert 40 <= len(read) <= 43


# ------------------------------------------------------------------------------------------ exact


@pytest.mark.parametrize("documents", [60, pytest.param(600, marks=pytest.mark.long)])
def test_stopped_anywhere_and_resumed_on_other_ranks_the_order_goes_on(
    documents: int, tmp_path: Path
) -> None:
    sizes = [7 + size for size in lengths(documents, seed=1)]
    folder = write_numbered(tmp_path / "d", sizes, group=2)
    one = passes(folder, lanes=12)
    begun = [one.opened().share.row]
    expected = []
    for row in one:
        expected.append(tokens_of(row))
        begun.append(one.opened().share.row)
    lockstep = next(i for i, row in enumerate(begun) if row > i)  # until a lane has ended
    assert lockstep > 36
    luck = random.Random(documents)
    for _ in range(4):
        state, done = None, 0
        while done < lockstep:
            world = luck.choice([1, 2, 3, 4, 6])
            everyone = ranks(folder, world, lanes=12)
            for each in everyone:
                if state is not None:
                    each.load_state_dict(state)
            count = min(luck.choice([1, 2, 9, 30]), (lockstep - done) // world)
            found = [taken(iter(each), count) for each in everyone]
            assert [row for rows in zip(*found, strict=True) for row in rows] == expected[
                done : done + count * world
            ]
            done += count * world
            state = in_json(merge_states([each.state_dict() for each in everyone]))
            if lockstep - done < 6:
                break
        last = passes(folder, lanes=12)
        last.load_state_dict(state)
        assert [tokens_of(row) for row in last] == expected[done:]


def test_a_state_of_any_row_goes_on_exactly_over_ends_of_passes(tmp_path: Path) -> None:
    folder = write_numbered(tmp_path / "d", lengths(40), group=3)
    stream = passes(folder, lanes=6, rank=1, world_size=2)
    states, rows = [in_json(stream.state_dict())], []
    for _ in range(3):
        for row in stream:
            rows.append(tokens_of(row))
            states.append(in_json(stream.state_dict()))
    for number, state in enumerate(states):
        again = passes(folder, lanes=6, rank=1, world_size=2)
        again.load_state_dict(state)
        assert in_json(again.state_dict()) == state
        found = [tokens_of(row) for _ in range(3 - state["epoch"]) for row in again]
        assert found == rows[number:], number
        if state["epoch"] < 3:
            assert rows[number] == taken(iter(resumed(again, state)), 1)[0], "an empty pass"
    assert max(len(json.dumps(state)) for state in states) < 1000


def resumed(stream: PassStream, state: Any) -> PassStream:
    stream.load_state_dict(state)
    return stream


def test_ranks_that_are_in_different_passes_go_on_exactly_once(tmp_path: Path) -> None:
    sizes = lengths(70)
    folder = write_numbered(tmp_path / "d", sizes, group=2)
    luck = random.Random(5)
    for _ in range(6):
        rows: list[Any] = []
        state = None
        for _ in range(luck.randint(1, 3)):
            everyone = ranks(folder, luck.choice([1, 2, 3, 4]), lanes=12)
            for each in everyone:
                if state is not None:
                    each.load_state_dict(state)
                wanted = luck.choice([0, 3, 8, 50])
                while wanted and each.epoch < 2:  # in the second pass at most
                    some = list(itertools.islice(each, wanted))
                    rows, wanted = rows + some, wanted - len(some)
            state = in_json(merge_states([each.state_dict() for each in everyone]))
        everyone = ranks(folder, luck.choice([1, 2, 3, 4]), lanes=12)
        for each in everyone:
            each.load_state_dict(state)
            while each.epoch < 2:
                rows += each
        assert traced(rows, sizes) == everything(sizes, 2)


def test_a_broken_off_pass_is_gone_on_with_and_so_is_one_that_was_closed(tmp_path: Path) -> None:
    folder = write_numbered(tmp_path / "d", lengths(60))
    expected = [[tokens_of(row) for row in stream] for stream in [passes(folder)] for _ in range(2)]
    stream = passes(folder)
    found = taken(iter(stream), 5)
    rows = iter(stream)
    found += taken(rows, 3)
    stream.close()
    found += [tokens_of(row) for row in rows]
    assert found == expected[0]
    assert [tokens_of(row) for row in stream] == expected[1]


def test_a_state_loaded_in_mid_iteration_is_gone_on_from(tmp_path: Path) -> None:
    folder = write_numbered(tmp_path / "d", lengths(60))
    stream = passes(folder)
    rows = iter(stream)
    taken(rows, 4)
    state = stream.state_dict()
    expected = taken(rows, 9)
    stream.load_state_dict(state)
    assert taken(rows, 9) == expected
    list(stream)
    stream.load_state_dict(state)
    assert taken(iter(stream), 9) == expected


@pytest.mark.parametrize("documents", [0, 1, 30, 10_000])
def test_a_state_of_epoch_and_documents_alone_loads_and_says_so(
    documents: int, tmp_path: Path
) -> None:
    sizes = lengths(60)
    folder = write_numbered(tmp_path / "d", sizes)
    stream, whole = passes(folder), passes(folder)
    list(whole)
    expected = [tokens_of(row) for row in whole]
    state = {"epoch": 1, "rank_docs_consumed": documents}
    if documents:
        with pytest.warns(UserWarning, match=f"only {documents:,} documents to leave out"):
            stream.load_state_dict(state)
    else:
        stream.load_state_dict(state)
    rows = [tokens_of(row) for row in stream]
    if documents == 10_000:
        assert stream.epoch == 3
    else:
        assert rows == expected[len(expected) - len(rows) :]
        assert (len(rows) < len(expected)) == bool(documents)


@pytest.mark.parametrize("pack", [True, False])
def test_copies_go_on_where_the_stream_is(pack: bool, tmp_path: Path) -> None:
    folder = write_numbered(tmp_path / "d", lengths(60))
    for copied in (copy.deepcopy, lambda stream: pickle.loads(pickle.dumps(stream))):
        stream = passes(folder, pack_sequences=pack)
        fresh = copied(stream)
        rows = iter(stream)
        assert next(iter(fresh))["labels"].tolist() == next(rows)["labels"].tolist()
        other = copied(stream)
        expected = [row["labels"].tolist() for row in rows]
        assert [row["labels"].tolist() for row in other] == expected


# ------------------------------------------------------------------------------- torch's workers


def loader(stream: PassStream, workers: int, *, spawn: bool = False, live: bool = False) -> Any:
    context = None if not workers else "spawn" if spawn else "fork"
    return DataLoader(
        stream,
        batch_size=None,
        num_workers=workers,
        multiprocessing_context=context,
        persistent_workers=live,
    )


@FORKING
@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize(
    ("workers", "live"), [(0, False), (2, False), (3, False), (2, True), (3, True)]
)
def test_workers_share_a_pass_and_the_next_one_differs(
    workers: int, live: bool, opened: bool, tmp_path: Path
) -> None:
    sizes = lengths(100)
    folder = write_numbered(tmp_path / "d", sizes, group=2)
    stream = passes(folder, lanes=12, rank=0, world_size=2)
    other = passes(folder, lanes=12, rank=1, world_size=2)
    if opened:
        stream.opened()
    batches = loader(stream, workers, live=live)
    orders = []
    for _ in range(3):
        rows = list(batches)
        orders.append([tokens_of(row) for row in rows])
        assert traced([*rows, *other], sizes) == everything(sizes)
    assert orders[0] != orders[1] != orders[2]


@FORKING
@pytest.mark.parametrize("live", [True, False])
def test_a_pass_that_workers_were_broken_off_in_is_followed_by_a_whole_one(
    live: bool, tmp_path: Path
) -> None:
    sizes = lengths(100)
    folder = write_numbered(tmp_path / "d", sizes, group=2)
    batches = loader(passes(folder), 3, live=live)
    first = taken(iter(batches), 4)
    second = [tokens_of(row) for row in itertools.islice(batches, 4)]
    assert first != second
    assert traced(batches, sizes) == everything(sizes)


@FORKING
@pytest.mark.parametrize("loaded", [True, False])
def test_workers_go_on_from_a_state_that_was_loaded_before(loaded: bool, tmp_path: Path) -> None:
    sizes = lengths(100)
    folder = write_numbered(tmp_path / "d", sizes, group=2)
    stream = passes(folder)
    list(stream)
    rows = list(itertools.islice(stream, 11))
    if loaded:
        state = in_json(stream.state_dict())
        stream = passes(folder)
        list(itertools.islice(loader(stream, 2), 5))
        stream.load_state_dict(state)
    batches = loader(stream, 3)
    assert traced([*rows, *batches], sizes) == everything(sizes)
    assert traced(batches, sizes) == everything(sizes)
    with pytest.warns(UserWarning, match="given by torch's worker processes"):
        stream.state_dict()


class Stateful:
    """What loaders with states in their workers do there: load, give, and save."""

    def __init__(self, states: Sequence[Any] | None, rows: int) -> None:
        self.states, self.rows = states, rows

    def __call__(self, worker: int) -> None:
        dataset = torch.utils.data.get_worker_info().dataset
        if self.states is not None:
            dataset.dataset.load_state_dict(self.states[worker])


class Saving(torch.utils.data.IterableDataset[Any]):
    def __init__(self, dataset: PassStream, rows: int) -> None:
        self.dataset, self.rows = dataset, rows

    def __iter__(self) -> Iterator[Any]:
        yield from itertools.islice(self.dataset, self.rows)
        yield self.dataset.state_dict()


@FORKING
def test_workers_states_are_gone_on_from_in_workers_and_merged_elsewhere(tmp_path: Path) -> None:
    sizes = lengths(100)
    folder = write_numbered(tmp_path / "d", sizes, group=2)
    rows: list[Any] = []
    states: list[Any] | None = None
    for count in (3, 40):  # in the end one worker is in the next pass
        saving = Saving(passes(folder), count)
        init = Stateful(states, count)
        found = list(DataLoader(saving, batch_size=None, num_workers=2, worker_init_fn=init))
        rows += [row for row in found if "labels" in row]
        states = [in_json(row) for row in found if "labels" not in row]
        states.sort(key=lambda state: "0" not in state["lanes"])
    last = passes(folder)
    last.load_state_dict(merge_states(states))
    while last.epoch < 1:
        rows += last
    assert traced(rows, sizes) == everything(sizes)


def test_spawned_workers_that_live_on_share_passes(tmp_path: Path) -> None:
    sizes = lengths(60)
    stream = passes(write_numbered(tmp_path / "d", sizes, group=2))
    rows = list(itertools.islice(stream, 5))
    batches = loader(stream, 2, spawn=True, live=True)
    assert traced([*rows, *batches], sizes) == everything(sizes)
    first, second = list(batches), list(batches)
    for found in (first, second):
        assert traced(found, sizes) == everything(sizes)
    assert list(map(tokens_of, first)) != list(map(tokens_of, second))


@pytest.mark.long
def test_workers_that_are_spawned_anew_share_passes(tmp_path: Path) -> None:
    sizes = lengths(60)
    batches = loader(passes(write_numbered(tmp_path / "d", sizes, group=2)), 3, spawn=True)
    orders = []
    for _ in range(3):
        rows = list(batches)
        assert traced(rows, sizes) == everything(sizes)
        orders.append(list(map(tokens_of, rows)))
    assert orders[0] != orders[1] != orders[2]


def test_workers_of_one_iter_agree_whoever_is_first_and_whatever_their_seed() -> None:
    luck = random.Random(1)
    for reseeded in [True, False] * 100:
        table, workers = PassTable(), luck.randint(1, 4)
        for epoch in range(6):
            seed = 7 if reseeded else epoch
            workers = workers if reseeded else luck.randint(1, 4)
            for worker in luck.sample(range(workers), workers):
                assert table.begin(worker=worker, seed=seed, least=0) == epoch
        table.clear()
        assert table.begin(worker=0, seed=7, least=5) == 5


def test_rows_are_not_pinned_in_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forked worker cannot use CUDA; loaders pin what workers gave."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", None)
    assert list(passes(write_numbered(tmp_path / "d", [4] * 9)))


# ---------------------------------------------------------------------------------- what goes wrong


def damaged(folder: Path, number: int) -> Callable[[], None]:
    """Damage one file's pages, and give what mends them."""
    file = sorted(folder.iterdir())[number]
    raw, stat = file.read_bytes(), file.stat()
    metadata = pq.read_metadata(file)
    begin = metadata.row_group(0).column(0).data_page_offset
    file.write_bytes(raw[:begin] + b"?" * (len(raw) - begin - 2000) + raw[-2000:])
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    def mend() -> None:
        file.write_bytes(raw)
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    return mend


@pytest.mark.parametrize("batched", [True, False])
def test_after_an_error_the_state_is_that_of_the_last_row_and_another_try_goes_on(
    batched: bool, tmp_path: Path
) -> None:
    sizes = [9] * 120
    folder = write_numbered(tmp_path / "d", sizes, group=4, files=6)
    expected = [tokens_of(row) for row in passes(folder, lanes=3)]
    stream = passes(folder, lanes=3)
    stream.opened()  # knows the files
    mend = damaged(folder, 3)
    rows, found = stream.batches(4) if batched else iter(stream), []

    def more() -> list[list[int]]:
        got = next(rows)
        if not batched:
            return [tokens_of(got)]
        return [tokens_of({k: got[k][i] for k in ("input_ids", "labels")}) for i in range(4)]

    def all_of_it() -> None:
        while True:
            found.extend(more())

    with pytest.raises(DataError, match=r"3\.parquet is cut short, damaged"):
        all_of_it()
    assert 0 < len(found) < len(expected)
    state = in_json(stream.state_dict())
    for _ in range(2):
        rows = stream.batches(4) if batched else iter(stream)
        with pytest.raises(DataError, match=r"3\.parquet is cut short, damaged"):
            next(rows)
        assert in_json(stream.state_dict()) == state
    mend()
    rows = stream.batches(4) if batched else iter(stream)
    while len(found) < len(expected) - 4:
        found += more()
    assert found == expected[: len(found)]
    again = passes(folder, lanes=3)
    again.load_state_dict(state)
    rest = [tokens_of(row) for row in again]
    assert rest == expected[len(expected) - len(rest) :]


def test_a_server_that_fails_gives_the_same_rows_and_one_that_is_down_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_REMOTE_WAIT", "0.001")
    folder = write_numbered(tmp_path / "d", lengths(200), files=2)
    expected = [tokens_of(row) for row in passes(folder)]
    with serving(folder) as server:
        urls = [server.url(f"{number}.parquet") for number in range(2)]
        stream = PassStream(urls, Numbering(), T, lanes=24, seed=3, threads=2)
        server.faults += ["429", "cut", "", "503", "drop", "short", "", "none", "close"]
        rows = iter(stream)
        found = taken(rows, 20)
        state = in_json(stream.state_dict())
        server.always, server.from_byte = "503", 1
        with pytest.raises(DataError, match=r"\d\.parquet: reading at byte [\d,]+ failed 6 times"):
            list(rows)
        server.always = ""
        again = PassStream(urls, Numbering(), T, lanes=24, seed=3, threads=2)
        again.load_state_dict(state)
        assert found + [tokens_of(row) for row in again] == expected


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"world_size": 7}, r"24 lanes cannot be dealt evenly to 7 ranks: run 1, 2, 3, 4, 6, 8"),
        ({"rank": 2, "world_size": 2}, r"rank must lie in \[0, 2\)"),
        ({"lanes": 0}, "lanes is a whole number >= 1, not 0"),
        ({"threads": 0}, "threads is a whole number >= 1, not 0"),
        ({"seed": 1.5}, "seed is a whole number, not 1.5"),
    ],
)
def test_settings_are_refused_before_anything_is_read(
    options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        passes(tmp_path / "nowhere", **options)


def test_a_tokenizer_without_eos_is_refused() -> None:
    with pytest.raises(ConfigError, match="numbering names no eos_token, and documents have to"):
        PassStream("nowhere", Numbering(eos_id=None), T)


def test_foreign_and_damaged_states_are_one_sentence_and_change_nothing(tmp_path: Path) -> None:
    folder = write_numbered(tmp_path / "d", lengths(60))
    stream = passes(folder)
    taken(iter(stream), 7)
    good = in_json(stream.state_dict())
    luck = random.Random(2)
    values = [None, -1, "x", 1.5, [], {}, True, 1 << 70, [1, 2], {"0": [0]}]
    keys = [key for key in good if key not in ("rank", "world_size", "revision")]
    states = [None, [], 3, "state", {}]
    for _ in range(150):
        state, key = copy.deepcopy(good), luck.choice(keys)
        if luck.random() < 0.2 and key != "rank_docs_consumed":
            del state[key]
            if key == "lanes":
                continue  # then it is one of epoch and documents
        else:
            state[key] = luck.choice(values)
        if state.get(key, ABSENT) != good[key] and key != "epoch":
            states.append(state)
    for state in states:
        with pytest.raises(StateMismatch) as error:
            stream.load_state_dict(state)
        assert "\n" not in str(error.value)
        assert in_json(stream.state_dict()) == good
    for options in ({"seed": 4}, {"lanes": 12}, {"shuffle": False}):
        with pytest.raises(StateMismatch, match="belongs to another run: "):
            passes(folder, **options).load_state_dict(good)
    others = write_numbered(tmp_path / "e", lengths(61))
    with pytest.raises(StateMismatch, match=r"data was .* and is .* here"):
        passes(others).load_state_dict(good)


ABSENT = object()


def test_much_padding_is_told_once_with_what_would_mend_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_numbered(tmp_path / "d", [9] * 60)
    with caplog.at_level(logging.WARNING, "penstock"):
        stream = passes(folder, lanes=240)
        list(stream)
        list(stream)
        list(passes(write_numbered(tmp_path / "e", [9] * 6000, group=100), lanes=2))
    assert len(caplog.records) == 1
    assert "is small for 240 lanes" in caplog.text
    assert "% will be padding; state fewer lanes" in caplog.text


def test_a_stream_says_what_it_is_and_has_no_length(tmp_path: Path) -> None:
    stream = passes(tmp_path / "d", rank=1, world_size=2)
    assert repr(stream).endswith("d: rank 1 of 2>")
    with pytest.raises(TypeError):
        len(stream)  # type: ignore[arg-type]


def test_files_without_a_document_are_one_error(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "a.parquet")
    with pytest.raises(PenstockError, match="holds no document"):
        list(passes(tmp_path / "a.parquet"))


def test_accounts_of_a_pass_add_up(tmp_path: Path) -> None:
    sizes = lengths(60)
    folder = write_numbered(tmp_path / "d", sizes)
    stream = passes(folder, lanes=4)
    rows = list(stream)
    ledger = stream.opened().stats()["ledger"]
    total = everything(sizes)
    assert ledger["rows"] == len(rows)
    assert ledger["delivered"] == sum(Counter(total).values())
    assert ledger["rows"] * (T + 1) == ledger["delivered"] + ledger["padding"]
    assert ledger["tokens"] == ledger["delivered"] + ledger["waiting"]
    assert ledger["trained"] == sum(int((row["labels"] != -100).sum()) for row in rows)


def test_in_order_a_lane_of_empty_units_alone_ends_its_passes(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = pa.table({"text": ["7 2", "9 0"] * 16})
    pq.write_table(texts, tmp_path / "a.parquet", row_group_size=1)
    rows = PassStream(tmp_path, Numbering(), 4, lanes=2, shuffle=False, threads=1)
    assert len(list(rows)) == len(list(rows)) > 0
    rows.close()
