"""Samplers in the loader, epochs and their lengths, schedules, validation, reports."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.loader.reference import Run, Simulation, take
from tests.loader.support import (
    IN_PROCESS,
    Kind,
    Pairs,
    Squares,
    Taking,
    assert_same,
    loaders,
    make_kinds,
    weights_of,
    write_npy,
    write_store,
)
from torch.utils.data import DistributedSampler as TorchSampler
from torch.utils.data import IterableDataset, RandomSampler

from penstock import (
    ConfigError,
    DataConfig,
    DistributedSampler,
    MemoryMappedDataset,
    MixtureDataset,
    MixtureSampler,
    ResumableDistributedSampler,
    Stage,
    StatefulDataLoader,
    TrainingPhase,
    WindowDataset,
    build_dataloader,
    open_store,
)
from penstock.batch import IGNORED


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Kind]:
    return make_kinds(tmp_path_factory.mktemp("kinds"))


def ids(batch: dict[str, Any]) -> list[int]:
    return batch["input_ids"][:, 0].tolist()


# -------------------------------------------------------------------------------------- samplers


def test_a_loader_gives_what_its_sampler_gives_in_batches() -> None:
    dataset = Taking(30)
    for rank in range(3):
        sampler = DistributedSampler(dataset, 3, rank, seed=5)
        alone = list(DistributedSampler(dataset, 3, rank, seed=5))
        loader = StatefulDataLoader(dataset, 2, sampler, IN_PROCESS)
        assert [i for batch in loader for i in ids(batch)] == alone


def test_a_mixture_sampler_alone_gives_the_same_draws_as_in_a_loader() -> None:
    dataset = MixtureDataset([Taking(30), Taking(10)], ["a", "b"])
    sampler = MixtureSampler(dataset.cumulative_sizes, [1, 2], 1, 0, seed=5)
    alone = list(MixtureSampler(dataset.cumulative_sizes, [1, 2], 1, 0, seed=5))
    loader = StatefulDataLoader(dataset, 8, sampler, IN_PROCESS)
    first = (0, 30)
    got = [
        first[k] + i
        for batch in loader
        for k, i in zip(batch["dataset_idx"].tolist(), ids(batch), strict=True)
    ]
    assert got == alone


def test_a_resumable_sampler_starts_the_loader_where_it_starts() -> None:
    dataset = Taking(30)
    whole = StatefulDataLoader(dataset, 4, ResumableDistributedSampler(dataset), IN_PROCESS)
    expected = [ids(batch) for _ in range(3) for batch in whole]
    sampler = ResumableDistributedSampler(dataset, start_epoch=1, start_iter=8)
    loader = StatefulDataLoader(dataset, 4, sampler, IN_PROCESS)
    assert (loader.epoch, loader.position) == (1, 38)
    assert [ids(batch) for _ in range(2) for batch in loader] == expected[9:21]


def test_a_skip_or_an_epoch_set_before_the_loader_is_built_is_its_first_position() -> None:
    dataset = Taking(30)
    sampler = DistributedSampler(dataset, 2, 1)
    sampler.set_epoch(2)
    sampler.set_skip(4)
    loader = StatefulDataLoader(dataset, 2, sampler, IN_PROCESS)
    assert (loader.epoch, loader.position) == (2, 68)
    again = StatefulDataLoader(dataset, 2, DistributedSampler(dataset, 2, 1), IN_PROCESS)
    again.load_state_dict(loader.state_dict())
    assert [ids(batch) for batch in again] == [ids(batch) for batch in loader]


def test_a_loader_that_starts_in_a_tail_starts_at_the_next_epoch() -> None:
    sampler = ResumableDistributedSampler(Taking(30), start_iter=28)
    loader = StatefulDataLoader(Taking(30), 4, sampler, IN_PROCESS)
    assert (loader.epoch, loader.position, len(loader)) == (1, 30, 7)


@pytest.mark.parametrize("foreign", [TorchSampler, RandomSampler, list])
def test_a_sampler_without_an_address_is_refused_by_name(foreign: Any) -> None:
    dataset = Taking(30)
    sampler = foreign(dataset, 1, 0) if foreign is TorchSampler else foreign(range(30))
    with pytest.raises(ConfigError, match=f"{foreign.__name__} gives indices without an address"):
        StatefulDataLoader(dataset, 4, sampler, IN_PROCESS)


def test_a_sampler_over_other_data_is_refused_with_both_lengths() -> None:
    sampler = DistributedSampler(Taking(31), 1, 0)
    with pytest.raises(ConfigError, match="over 31 samples and the dataset has 30"):
        StatefulDataLoader(Taking(30), 4, sampler, IN_PROCESS)


def test_a_mixture_sampler_over_other_datasets_of_the_same_total_is_refused() -> None:
    dataset = MixtureDataset([Taking(10), Taking(10)], ["a", "b"])
    sampler = MixtureSampler([0, 5, 20], [1, 1], 1, 0)
    with pytest.raises(ConfigError, match=r"end at \[0, 5, 20\] and this mixture's at \[0, 10, 20"):
        StatefulDataLoader(dataset, 4, sampler, IN_PROCESS)


def test_an_iterable_dataset_is_refused_in_words() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(5))

    with pytest.raises(ConfigError, match="Stream has no length or no items"):
        StatefulDataLoader(Stream(), 4, config=IN_PROCESS)


def test_a_dataset_of_tuples_comes_out_as_torch_collates_it() -> None:
    for workers in ("thread", "process"):
        config = DataConfig(num_workers=1)
        sampler = DistributedSampler(Pairs(9), 1, 0, shuffle=False)
        for device in (None, "cpu"):
            loader = StatefulDataLoader(
                Pairs(9), 3, sampler, config, workers=workers, device=device
            )
            assert_same(
                list(loader),
                [[torch.arange(k, k + 3)[:, None], torch.arange(k, k + 3)] for k in (0, 3, 6)],
            )


# ------------------------------------------------------------------------------------- too small


@pytest.mark.parametrize("n", [0, 1, 7])
def test_fewer_samples_than_a_global_batch_is_an_error_that_says_how_many(n: int) -> None:
    with pytest.raises(ConfigError, match=rf"has {n} samples, and one global batch .* takes 8"):
        StatefulDataLoader(Taking(n), 4, DistributedSampler(Taking(n), 2, 0), IN_PROCESS)


def test_that_holds_for_mixtures_and_for_sizes_that_come_later() -> None:
    dataset = MixtureDataset([Taking(5), Taking(4)], ["a", "b"])
    sampler = MixtureSampler(dataset.cumulative_sizes, [1, 1], 1, 0)
    for size in (10, [(0, 5), (3, 10)]):
        with pytest.raises(ConfigError, match=r"has 9 samples, .* takes 10"):
            StatefulDataLoader(dataset, size, sampler, IN_PROCESS)
    with pytest.raises(ConfigError, match=r"has 9 samples, .* takes 10"):
        StatefulDataLoader(Taking(9), [(0, 5), (3, 10)], config=IN_PROCESS)


def test_exactly_one_global_batch_is_enough() -> None:
    loader = StatefulDataLoader(Taking(8), 4, DistributedSampler(Taking(8), 2, 1), IN_PROCESS)
    assert [len(list(loader)) for _ in range(3)] == [1, 1, 1]
    assert loader.epoch == 3


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (0, "at least 1"),
        (-4, "at least 1"),
        ([], "increasing steps from 0"),
        ([(5, 4)], "increasing steps from 0"),
        ([(0, 4), (0, 8)], "increasing steps from 0"),
        ([(0, 4), (9, 8), (5, 2)], "increasing steps from 0"),
        ([(0, 0)], "at least 1"),
        ([(0, 4), (5, -1)], "at least 1"),
        (4.0, "a whole number, or a schedule"),
        ("8", "a whole number, or a schedule"),
        (True, "a whole number, or a schedule"),
        (None, "a whole number, or a schedule"),
        ([(0, 4, 1)], "a whole number, or a schedule"),
        ([(0, 4.5)], "a whole number, or a schedule"),
        ([4, 8], "a whole number, or a schedule"),
        ({0: 4}, "a whole number, or a schedule"),
    ],
)
def test_a_batch_size_that_cannot_be_meant_is_refused(size: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        StatefulDataLoader(Taking(30), size, DistributedSampler(Taking(30), 1, 0), IN_PROCESS)


def test_batch_sizes_may_be_numpy_integers() -> None:
    sampler = DistributedSampler(Taking(30), 1, 0)
    schedule = [(np.int32(0), np.int64(4))]
    assert len(StatefulDataLoader(Taking(30), np.int64(4), sampler, IN_PROCESS)) == 7  # type: ignore[arg-type]
    assert len(StatefulDataLoader(Taking(30), schedule, sampler, IN_PROCESS)) == 7  # type: ignore[arg-type]


def test_accumulation_that_is_no_number_of_batches_unknown_workers_and_tails_are_refused() -> None:
    for accumulation in (0, 1.5, True):
        with pytest.raises(ConfigError, match="accumulation is a whole number >= 1"):
            StatefulDataLoader(Taking(30), 4, config=IN_PROCESS, accumulation=accumulation)
    with pytest.raises(ConfigError, match="tail is 'drop' or 'pad', not 'keep'"):
        StatefulDataLoader(Taking(30), 4, config=IN_PROCESS, tail="keep")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="'auto', 'thread' or 'process', not 'fast'"):
        StatefulDataLoader(Taking(30), 4, config=IN_PROCESS, workers="fast")  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------- epochs


@given(data=st.data())
def test_len_is_what_an_epoch_yields(data: st.DataObject) -> None:
    """With schedules, on every rank, in each of three epochs; seen from its middle too."""
    world = data.draw(st.sampled_from([1, 2, 3]))
    n = data.draw(st.integers(18, 60))
    steps = sorted(data.draw(st.sets(st.integers(1, 25), max_size=3)))
    sizes = data.draw(st.lists(st.integers(1, 6), min_size=4, max_size=4))
    schedule = list(zip([0, *steps], sizes, strict=False))
    accumulation = data.draw(st.integers(1, 3))
    mixed = data.draw(st.booleans())
    tail = data.draw(st.sampled_from(["drop", "pad"]))
    for rank in range(world):
        dataset: Any = Labelled(n)
        sampler: Any = DistributedSampler(dataset, world, rank)
        if mixed:
            sampler = MixtureSampler([0, n - 5, n], [1, 1], world, rank)
        loader = StatefulDataLoader(
            dataset, schedule, sampler, IN_PROCESS, accumulation=accumulation, tail=tail
        )
        for epoch in range(3):
            promised, given = len(loader), 0
            assert loader.epoch == epoch
            for _ in loader:
                given += 1
                assert loader.epoch == epoch + (given == promised) == loader.state_dict()["epoch"]
                assert given == promised or len(loader) == promised
            assert given == promised


class Labelled(Taking):
    """With labels, so that a batch may be padded."""

    def take(self, indices: Any) -> Any:
        batch = super().take(indices)
        return {**batch, "labels": batch["input_ids"].clone()}


def test_a_schedule_changes_the_size_at_its_exact_step_whatever_is_left_of_an_epoch() -> None:
    """At step 11 eight positions fit into the epoch and sixteen do not: the epoch is over."""
    run = Run(sizes=(100,), schedule=((0, 8), (11, 16), (12, 4)))
    simulation = Simulation(run)
    (loader,) = loaders(Kind(name="n", dataset=Taking(100), sizes=(100,)), run, 1)
    for _ in range(2):
        for batch in loader:
            expected = next(simulation)
            assert len(ids(batch)) == len(expected.samples)
            assert ids(batch) == list(expected.samples)
            assert len(ids(batch)) == (
                16 if expected.step == 11 else 4 if expected.step > 11 else 8
            )
    assert simulation.epoch == 2


def test_a_smaller_batch_uses_what_a_larger_one_would_have_dropped() -> None:
    loader = StatefulDataLoader(
        Taking(100), [(0, 16), (6, 4)], DistributedSampler(Taking(100), 1, 0), IN_PROCESS
    )
    assert [len(ids(batch)) for batch in loader] == [16] * 6 + [4]


def test_steps_count_accumulated_batches_and_never_start_again() -> None:
    run = Run(sizes=(50,), schedule=((0, 6), (4, 12)), accumulation=3)
    ranks = loaders(Kind(name="n", dataset=Taking(50), sizes=(50,)), run, 2)
    steps = []
    for batch in take(run, 20):
        steps.append(ranks[0].step)
        assert steps[-1] == batch.step
        for loader in ranks:
            next(iter(loader))
    assert steps == [k // 3 for k in range(20)]


# ------------------------------------------------------------------------------------ validation


@pytest.mark.parametrize(
    "name", ["windows", "packed", "store", "store_packed", "mixture", "seq", "sft"]
)
@pytest.mark.parametrize(("world", "batch_size"), [(1, 4), (2, 3), (3, 5), (4, 20), (1, 1)])
def test_validation_gives_every_sample_once_in_order_and_pads_the_last_batch(
    kinds: dict[str, Kind], name: str, world: int, batch_size: int
) -> None:
    dataset = kinds[name].dataset
    n, size = len(dataset), batch_size * world
    ranks = [
        StatefulDataLoader(
            dataset,
            batch_size,
            DistributedSampler(dataset, world, r, False),
            IN_PROCESS,
            tail="pad",
        )
        for r in range(world)
    ]
    for _ in range(2):  # again, from the start
        epochs = [list(loader) for loader in ranks]
        assert {len(epoch) for epoch in epochs} == {-(-n // size)} == {len(ranks[0])}
        for number, got in enumerate(zip(*epochs, strict=True)):
            for rank, batch in enumerate(got):
                at = range(number * size + rank, (number + 1) * size, world)
                real = [i for i in at if i < n]
                expected = kinds[name].expected([i % n for i in at])
                for key in ("labels", "target_ids", "loss_mask"):
                    if key in expected:
                        expected[key][len(real) :] = 0 if key == "loss_mask" else IGNORED
                assert_same(batch, expected)


def test_validation_is_resumable_with_any_number_of_ranks(kinds: dict[str, Kind]) -> None:
    dataset = kinds["windows"].dataset

    def ranks(world: int) -> list[StatefulDataLoader]:
        return [
            StatefulDataLoader(
                dataset,
                6 // world,
                DistributedSampler(dataset, world, r, False),
                IN_PROCESS,
                tail="pad",
            )
            for r in range(world)
        ]

    whole = list(ranks(1)[0])
    for stop in range(len(whole) + 1):
        first = ranks(2)[1]
        for number, _ in enumerate(first):
            if number + 1 == stop:
                break
        if stop == 0:
            first = ranks(2)[1]
        later = ranks(3)
        for loader in later:
            loader.load_state_dict(first.state_dict())
        expected = whole[stop:] or whole  # at the end: the next pass
        for batch, got in zip(expected, zip(*later, strict=True), strict=True):
            merged = torch.stack([each["input_ids"] for each in got], 1).flatten(0, 1)
            assert torch.equal(merged, batch["input_ids"])


def test_more_ranks_than_samples_still_validate_each_sample_once() -> None:
    dataset = Labelled(3)
    trained = 0
    for rank in range(8):
        sampler = DistributedSampler(dataset, 8, rank, shuffle=False)
        (batch,) = StatefulDataLoader(dataset, 1, sampler, IN_PROCESS, tail="pad")
        trained += int((batch["labels"] != IGNORED).any(1).sum())
    assert trained == 3


def test_samples_without_labels_cannot_be_padded_and_that_is_said() -> None:
    sampler = DistributedSampler(Squares(5), 1, 0, shuffle=False)
    loader = StatefulDataLoader(Squares(5), 2, sampler, IN_PROCESS, tail="pad")
    with pytest.raises(ConfigError, match="labels to mask"):
        list(loader)


@pytest.mark.parametrize("options", [{"split": "val"}, {"shuffle": False}])
def test_a_built_validation_loader_reads_everything_once_in_order(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    path = write_npy(tmp_path / "t", [100, 64])
    seen = []
    for rank in range(2):
        loader = build_dataloader(
            DataConfig(str(path), num_workers=0),
            batch_size=2,
            seq_len=8,
            rank=rank,
            world_size=2,
            **options,
        )
        seen.append([batch["input_ids"][batch["labels"][:, 0] != IGNORED] for batch in loader])
    got = [torch.stack(r)[None] for r in ()] or [
        row for pair in zip(*seen, strict=True) for row in _interleaved(pair)
    ]
    expected = MemoryMappedDataset(path, 9)
    assert torch.equal(torch.stack(got), expected.take(range(len(expected)))["input_ids"])


def _interleaved(pair: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    a, b = pair
    rows: list[torch.Tensor] = []
    for k in range(len(a)):
        rows += [a[k]] + ([b[k]] if k < len(b) else [])
    return rows


# --------------------------------------------------------------------------------------- reports


def test_stats_count_what_was_delivered_and_not_what_was_prefetched(tmp_path: Path) -> None:
    dataset = MemoryMappedDataset(write_npy(tmp_path / "t", [900]), 9)
    loader = StatefulDataLoader(dataset, 4, DistributedSampler(dataset, 1, 0), DataConfig())
    for number, _ in enumerate(loader, 1):
        stats = loader.stats()
        assert (stats["batches"], stats["tokens"]) == (number, number * 4 * 8)
        if number == 5:
            break
    assert stats["tokens_per_second"] > 0
    assert 0 <= stats["waited_seconds"] <= stats["seconds"]
    loader.load_state_dict(loader.state_dict())
    assert loader.stats()["batches"] == 0


@pytest.mark.parametrize(("name", "a_sample"), [("items", 4), ("tuples", 0)])
def test_stats_know_tokens_where_a_batch_names_them(
    kinds: dict[str, Kind], name: str, a_sample: int
) -> None:
    dataset = kinds[name].dataset
    loader = StatefulDataLoader(dataset, 4, DistributedSampler(dataset, 1, 0), IN_PROCESS)
    next(iter(loader))
    assert loader.stats()["tokens"] == 4 * a_sample


def test_stats_by_source_are_of_all_ranks_since_the_state_was_loaded() -> None:
    dataset = MixtureDataset([Taking(40), Taking(25)], ["a", "b"])
    sizes, names = dataset.cumulative_sizes, ["a", "b"]

    def make(rank: int) -> StatefulDataLoader:
        sampler = MixtureSampler(sizes, [3, 1], 2, rank)  # the dataset knows the names
        return StatefulDataLoader(dataset, 4, sampler, IN_PROCESS)

    ranks = [make(0), make(1)]
    given = [0, 0]
    for pair in zip(*ranks, strict=True):
        for batch in pair:
            for k in batch["dataset_idx"].tolist():
                given[k] += 1
        assert ranks[0].stats()["samples_by_source"] == dict(zip(names, given, strict=True))
    resumed = make(1)
    resumed.load_state_dict(ranks[0].state_dict())
    assert resumed.stats()["samples_by_source"] == {"a": 0, "b": 0}


# ---------------------------------------------------------------------------------------- phases


def test_lr_scale_follows_the_position_of_the_batch_last_delivered(tmp_path: Path) -> None:
    path = str(write_npy(tmp_path / "t", [2000]))
    phases = [TrainingPhase(0, lr_scale=2.0), TrainingPhase(3, lr_scale=0.5), TrainingPhase(7)]
    config = DataConfig(path, phases=phases, num_workers=0)

    def make(batch_size: int, accumulation: int) -> StatefulDataLoader:
        return build_dataloader(
            config,
            batch_size=batch_size,
            seq_len=8,
            rank=0,
            world_size=1,
            accumulation=accumulation,
        )

    loader = make(4, 2)
    assert loader.lr_scale == 2.0
    scales = []
    for number, _ in enumerate(loader):
        scales.append(loader.lr_scale)
        assert scales[-1] == config.lr_scale(number // 2)
        if number == 4:
            state = loader.state_dict()
    assert scales[:16] == [2.0] * 6 + [0.5] * 8 + [1.0] * 2
    resumed = make(8, 1)  # other sizes: the phases stay where they were, at positions 24 and 56
    resumed.load_state_dict(state)
    starts = [20, 28, 36, 44, 52, 60]
    got = [resumed.lr_scale for _, _ in zip(starts, resumed, strict=False)]
    assert got == [2.0 if at < 24 else 0.5 if at < 56 else 1.0 for at in starts]


def test_a_phase_that_begins_in_the_middle_of_a_larger_batch_begins_there_for_its_samples() -> None:
    sizes = (100, 50)
    dataset = MixtureDataset([Taking(n) for n in sizes], ["a", "b"])
    stages = [Stage(0, weights_of(1, 0), 0), Stage(20, weights_of(0, 1), 5)]
    sampler = MixtureSampler(dataset.cumulative_sizes, [], 1, 0, names=["a", "b"], stages=stages)
    loader = StatefulDataLoader(dataset, 8, sampler, IN_PROCESS)
    got = torch.cat([batch["dataset_idx"] for _, batch in zip(range(5), loader, strict=False)])
    assert got.tolist() == [0] * 20 + [1] * 20


def test_every_token_of_a_store_but_the_first_is_a_label_once(tmp_path: Path) -> None:
    store = open_store(write_store(tmp_path / "s", 30, masked=False))
    dataset = WindowDataset(store, 8)
    sampler = DistributedSampler(dataset, 1, 0, shuffle=False)
    batches = list(StatefulDataLoader(dataset, 3, sampler, IN_PROCESS, tail="pad"))
    labels = torch.cat([batch["labels"] for batch in batches]).flatten()
    labels = labels[labels != IGNORED]
    assert labels.tolist() == store.read(0, len(store), "sequence")[1 : 1 + len(labels)].tolist()
    assert len(store) - 1 - len(labels) < 8


def test_positions_are_delivered_once_each_whatever_the_tail(kinds: dict[str, Kind]) -> None:
    for tail in ("drop", "pad"):
        loader = StatefulDataLoader(
            Labelled(30), 4, DistributedSampler(Labelled(30), 1, 0), IN_PROCESS, tail=tail
        )
        at = [loader.position]
        for _ in range(3):
            at += [loader.position for _ in loader]
        assert all(b - a == 4 or b % 30 == 0 for a, b in pairwise(at))
        assert at[-1] == 90
