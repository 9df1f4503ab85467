"""States: what they say, that they go on from any moment, and what is refused, in words."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.loader.reference import Run, take
from tests.loader.support import (
    EOS,
    IN_PROCESS,
    Pairs,
    Squares,
    Taking,
    through_json,
    weights_of,
    write_npy,
)

from penstock import (
    DataConfig,
    DatasetSource,
    DistributedSampler,
    MemoryMappedDataset,
    MixtureDataset,
    MixtureSampler,
    PenstockError,
    ResumableDistributedSampler,
    Stage,
    StatefulDataLoader,
    StateMismatch,
    TrainingPhase,
    build_dataloader,
)
from penstock.loader.state import VERSION


def make(
    dataset: Any = None,
    batch_size: Any = 4,
    *,
    world: int = 1,
    rank: int = 0,
    seed: int = 1,
    **more: Any,
) -> StatefulDataLoader:
    dataset = Squares(30) if dataset is None else dataset
    sampler = DistributedSampler(dataset, world, rank, seed=seed)
    return StatefulDataLoader(dataset, batch_size, sampler, IN_PROCESS, **more)


def ids(batch: dict[str, Any]) -> list[int]:
    return batch["input_ids"][:, 0].tolist()


def rest(loader: StatefulDataLoader, batches: int) -> list[list[int]]:
    """The next batches, epoch after epoch."""
    found: list[list[int]] = []
    while len(found) < batches:
        found += [ids(batch) for batch in loader]
    return found[:batches]


# -------------------------------------------------------------------------------- what they say


def test_a_state_has_the_documented_keys_and_is_json() -> None:
    loader = make(world=2, rank=1)
    iterator = iter(loader)
    next(iterator), next(iterator)
    state = through_json(loader.state_dict())
    assert (state["epoch"], state["batches_yielded"]) == (0, 2)
    assert state["sampler"] == {"epoch": 0, "seed": 1, "num_replicas": 2, "rank": 1}
    assert (state["position"], state["step"], state["version"]) == (16, 2, VERSION)


def test_a_state_stays_small_however_large_the_data() -> None:
    loader = make(Taking(10**9))
    iterator = iter(loader)
    next(iterator)
    assert len(json.dumps(loader.state_dict())) < 1000


def test_after_the_last_batch_of_an_epoch_a_state_is_the_next_epochs_start() -> None:
    loader = make()
    for _ in loader:
        state = loader.state_dict()
    assert state == loader.state_dict()
    assert (state["epoch"], state["batches_yielded"], state["position"]) == (1, 0, 30)
    resumed = make()
    resumed.load_state_dict(state)
    assert rest(resumed, 9) == rest(loader, 9)


def test_a_state_taken_before_the_first_batch_is_the_start() -> None:
    untouched, started = make(), make()
    state = started.state_dict()
    next(iter(started))
    started.load_state_dict(state)
    assert started.state_dict() == state
    assert rest(started, 10) == rest(untouched, 10)


def test_a_state_is_not_moved_by_what_was_prefetched() -> None:
    for workers in ("thread", "process"):
        dataset = Taking(30)
        sampler = DistributedSampler(dataset, 1, 0, seed=1)
        config = DataConfig(num_workers=1, prefetch_factor=4)
        loader = StatefulDataLoader(dataset, 4, sampler, config, workers=workers)
        iterator = iter(loader)
        next(iterator)
        assert loader.state_dict()["position"] == 4
        iterator.close()  # type: ignore[attr-defined]
        assert loader.state_dict()["position"] == 4


# ------------------------------------------------------------------------------- one cursor only


def test_iter_a_second_time_in_mid_epoch_goes_on() -> None:
    loader, whole = make(), rest(make(), 7)
    first = iter(loader)
    got = [ids(next(first)), ids(next(first))]
    second = iter(loader)
    got += [ids(next(second)), ids(next(first)), ids(next(second))]
    got += [ids(batch) for batch in first]
    assert got == whole
    assert list(second) == []  # the epoch it belongs to is over


def test_a_state_loaded_while_iterating_takes_effect_at_the_next_batch() -> None:
    loader, whole = make(), rest(make(), 7)
    iterator = iter(loader)
    start = loader.state_dict()
    assert [ids(next(iterator)) for _ in range(3)] == whole[:3]
    third = loader.state_dict()
    loader.load_state_dict(start)
    assert [ids(next(iterator)) for _ in range(2)] == whole[:2]
    loader.load_state_dict(third)
    assert [ids(batch) for batch in iterator] == whole[3:]


def test_a_state_of_another_epoch_loaded_while_iterating_ends_the_iteration() -> None:
    other, loader = make(), make()
    list(other)
    iterator = iter(loader)
    next(iterator)
    loader.load_state_dict(other.state_dict())
    assert list(iterator) == []
    assert rest(loader, 7) == rest(other, 7)


# ------------------------------------------------------------------------------- update_weights

SIZES, NAMES = (40, 25), ("a", "b")
OLD, NEW, LATE = weights_of(3, 1), weights_of(1, 5), weights_of(1, 0)


def mixed(*, world: int = 1, rank: int = 0, late: int | None = None) -> StatefulDataLoader:
    dataset = MixtureDataset([Squares(n) for n in SIZES], NAMES)
    stages = [Stage(0, OLD, 0)] + ([Stage(late * 8, LATE, late)] if late else [])
    sampler = MixtureSampler(
        dataset.cumulative_sizes, [], world, rank, seed=2, names=NAMES, stages=stages
    )
    return StatefulDataLoader(dataset, 8 // world, sampler, IN_PROCESS)


def places(batch: dict[str, Any]) -> list[int]:
    """A mixture's batch as indices into the whole."""
    first = (0, SIZES[0])
    return [first[k] + i for k, i in zip(batch["dataset_idx"].tolist(), ids(batch), strict=True)]


def planned(batches: int, *phases: tuple[int, tuple[int, ...]]) -> list[list[int]]:
    run = Run(sizes=SIZES, names=NAMES, schedule=((0, 8),), phases=phases, seed=2, tail="endless")
    return [list(batch.samples) for batch in take(run, batches)]


def rest_of_mixture(loader: StatefulDataLoader, batches: int) -> list[list[int]]:
    found: list[list[int]] = []
    while len(found) < batches:
        found += [places(batch) for batch in loader]
    return found[:batches]


def resumed(loader: StatefulDataLoader) -> StatefulDataLoader:
    again = mixed()
    again.load_state_dict(through_json(loader.state_dict()))
    assert again.state_dict() == loader.state_dict()
    return again


def test_new_weights_wait_for_the_next_iteration_and_survive_a_resume_before_it() -> None:
    expected = planned(18, (0, OLD), (9, NEW))
    loader = mixed()
    assert [places(batch) for batch in loader] == expected[:9]
    loader.sampler.update_weights([1, 5])
    assert "pending" in loader.state_dict()
    for each in (resumed(loader), loader):
        assert [places(batch) for batch in each] == expected[9:17]
        assert "pending" not in each.state_dict()


def test_weights_updated_while_an_iterator_is_suspended_wait_for_its_end() -> None:
    expected = planned(18, (0, OLD), (9, NEW))
    loader = mixed()
    iterator = iter(loader)
    got = [places(next(iterator)) for _ in range(4)]
    loader.sampler.update_weights([1, 5])
    later = resumed(loader)  # whose first iteration is the rest of that one
    got += [places(batch) for batch in iterator]
    assert got == expected[:9]
    assert [places(batch) for batch in later] == expected[4:9]
    for each in (resumed(later), later, loader):
        assert [places(batch) for batch in each] == expected[9:17]


def test_weights_updated_after_a_break_act_where_the_loop_stopped() -> None:
    expected = planned(12, (0, OLD), (4, NEW))
    loader = mixed()
    for number, batch in enumerate(loader):
        assert places(batch) == expected[number]
        if number == 3:
            break
    loader.sampler.update_weights([1, 5])
    for each in (resumed(loader), loader):
        assert [places(batch) for batch in each] == expected[4:9]


def test_an_iterator_left_suspended_sees_the_weights_of_a_newer_one() -> None:
    expected = planned(9, (0, OLD), (2, NEW))
    loader = mixed()
    old = iter(loader)
    got = [places(next(old)), places(next(old))]
    loader.sampler.update_weights([1, 5])
    new = iter(loader)
    got += [places(next(old)), places(next(new)), places(next(old))]
    assert got + [places(batch) for batch in new] == expected


def test_a_declared_phase_still_begins_at_its_step_after_weights_set_by_hand() -> None:
    loader = mixed(late=5)
    iterator = iter(loader)
    got = [places(next(iterator)) for _ in range(3)]
    loader.sampler.update_weights([1, 5])
    got += [places(batch) for batch in iter(loader)]
    assert got == planned(9, (0, OLD), (3, NEW), (5, LATE))


@settings(max_examples=60)
@given(
    st.lists(st.sampled_from(["next", "next", "next", "update", "break", "resume"]), max_size=40)
)
def test_any_history_of_updates_breaks_and_resumes_is_one_run(actions: list[str]) -> None:
    """Weights begin where a new iteration does; a resume into one that was running is not one."""
    stages, waiting, updates, goes_on = {0: OLD}, None, 0, False
    ranks, delivered = [mixed()], []
    running: tuple[int, list[Any]] | None = None  # the epoch of the iterators, and they
    for action in actions:
        if action == "next":
            got: list[Any] = [None]
            while got[0] is None:
                if running is None:
                    if waiting is not None and not goes_on:
                        stages[ranks[0].position // 8], waiting = waiting, None
                    goes_on = False
                    running = ranks[0].epoch, [iter(loader) for loader in ranks]
                got = [next(iterator, None) for iterator in running[1]]
                running = running if got[0] is not None else None
            whole = np.stack([places(batch) for batch in got], 1).reshape(-1)
            delivered.append(whole.tolist())
        elif action == "update":
            updates += 1
            waiting = weights_of(1, updates)
            for loader in ranks:
                loader.sampler.update_weights([1, updates])
        elif action == "break":
            running = None
        else:
            goes_on = goes_on or (running is not None and running[0] == ranks[0].epoch)
            goes_on = goes_on and waiting is not None
            state = through_json(ranks[-1].state_dict())
            world = (1, 2, 4)[len(delivered) % 3]
            ranks, running = [mixed(world=world, rank=rank) for rank in range(world)], None
            for loader in ranks:
                loader.load_state_dict(state)
    assert delivered == planned(len(delivered), *sorted(stages.items()))


# ------------------------------------------------------------------------- the documented keys


def test_a_state_of_only_the_documented_keys_loads_with_a_warning_at_the_callers_line() -> None:
    whole = rest(make(), 14)
    for batches in (0, 3, 6, 7):
        loader = make()
        state = {"epoch": 1, "batches_yielded": batches, "sampler": {"seed": 1, "num_replicas": 1}}
        with pytest.warns(
            UserWarning, match="only the documented keys.*4 samples on 1 ranks"
        ) as seen:
            loader.load_state_dict(state)
        assert [Path(each.filename).name for each in seen] == [Path(__file__).name]
        assert rest(loader, 14 - 7 - batches) == whole[7 + batches :]


def test_the_documented_keys_of_another_number_of_ranks_give_the_same_global_place() -> None:
    loader = make(batch_size=2, world=1)
    with pytest.warns(UserWarning, match="2 samples on 3 ranks"):
        loader.load_state_dict(
            {"epoch": 0, "batches_yielded": 2, "sampler": {"num_replicas": 3, "rank": 1}}
        )
    assert loader.position == 2 * 2 * 3


def test_the_documented_keys_keep_the_stages_of_a_mixture() -> None:
    loader = mixed(late=5)
    with pytest.warns(UserWarning, match="documented"):
        loader.load_state_dict({"epoch": 0, "batches_yielded": 4})
    expected = planned(9, (0, OLD), (5, LATE))
    assert [places(batch) for batch in loader] == expected[4:]


def test_the_documented_keys_of_another_seed_are_refused() -> None:
    state = {"epoch": 0, "batches_yielded": 1, "sampler": {"seed": 9}}
    with pytest.raises(StateMismatch, match=r"sampler\.seed was 9 and is 1 here"):
        make().load_state_dict(state)


# ------------------------------------------------------------------------------ another run's


def windows(folder: Path, **changed: Any) -> StatefulDataLoader:
    """A loader over token files, some of its settings changed."""
    settings = {"seq_len": 9, "seed": 1, "tokens": 0, "files": [400], "shuffle": True} | changed
    where = folder / f"{settings['tokens']}-{settings['files']}"
    write_npy(where, settings["files"], seed=settings["tokens"])
    eos = settings.get("eos")
    dataset = MemoryMappedDataset(where, settings["seq_len"], "*.npy", eos is not None, eos)
    sampler = DistributedSampler(dataset, 1, 0, settings["shuffle"], settings["seed"])
    return StatefulDataLoader(dataset, 4, sampler, IN_PROCESS)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"seed": 2}, ["seed was 1 and is 2 here"]),
        ({"tokens": 5}, ["data was '"]),
        ({"files": [400, 90]}, ["data was '", "samples was 44 and is 54 here"]),
        ({"seq_len": 10}, ["window was 9 and is 10 here", "samples was 44 and is 40 here"]),
        ({"eos": EOS}, ["pack_sequences was False and is True", "eos_token_id was None and is 3"]),
        ({"shuffle": False}, ["shuffle was True and is False here"]),
        ({"seed": 2, "seq_len": 10}, ["seed was 1 and is 2 here", "window was 9"]),
    ],
)
def test_a_state_of_another_run_is_refused_by_the_names_of_what_differs(
    tmp_path: Path, changed: dict[str, Any], said: list[str]
) -> None:
    state = through_json(windows(tmp_path).state_dict())
    loader = windows(tmp_path, **changed)
    before = loader.state_dict()
    with pytest.raises(StateMismatch, match="belongs to another run") as refused:
        loader.load_state_dict(state)
    for words in said:
        assert words in str(refused.value)
    assert "seed was" not in str(refused.value) or "seed" in changed
    assert loader.state_dict() == before


@pytest.fixture
def web_and_code(tmp_path: Path) -> dict[str, Path]:
    write_npy(tmp_path / "other", [500], seed=9)
    return {
        name: write_npy(tmp_path / name, [length], seed=k)
        for k, (name, length) in enumerate([("web", 500), ("code", 300)])
    }


def built(sources: dict[str, Path], **changed: Any) -> StatefulDataLoader:
    weights = changed.pop("weights", (3.0, 1.0))
    names = changed.pop("names", tuple(sources))
    datasets = [
        DatasetSource(str(path), weight, name)
        for path, weight, name in zip(sources.values(), weights, names, strict=True)
    ]
    phases = changed.pop("phases", [TrainingPhase(4, {names[0]: 1.0}, 0.5)])
    config = DataConfig(datasets=datasets, phases=phases, num_workers=0, **changed)
    return build_dataloader(config, batch_size=4, seq_len=8, rank=0, world_size=1)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"weights": (2.0, 1.0)}, "mixture.weights"),
        ({"mix_temperature": 2.0}, "mixture.weights"),
        ({"names": ("web", "src")}, "sources.code was {'data'"),
        ({"phases": [TrainingPhase(5, {"web": 1.0})]}, "mixture.weights was [[0, ["),
        ({"phases": []}, "mixture.weights"),
        ({"weights_count": "tokens"}, None),  # as many tokens in each sample: nothing changes
    ],
)
def test_a_state_of_another_mixture_is_refused_by_what_differs(
    web_and_code: dict[str, Path], changed: dict[str, Any], said: str | None
) -> None:
    state = through_json(built(web_and_code).state_dict())
    loader = built(web_and_code, **changed)
    if said is None:
        loader.load_state_dict(state)
        return
    with pytest.raises(StateMismatch) as refused:
        loader.load_state_dict(state)
    assert said in str(refused.value)


def test_a_source_whose_data_changed_is_named(web_and_code: dict[str, Path]) -> None:
    state = through_json(built(web_and_code).state_dict())
    np.save(web_and_code["code"] / "part_000.npy", np.arange(300, dtype=np.uint16))
    with pytest.raises(
        StateMismatch, match=r"sources\.code\.data was .* and is .* here"
    ) as refused:
        built(web_and_code).load_state_dict(state)
    assert "web" not in str(refused.value)


def test_phases_of_a_single_dataset_belong_to_the_run_too(tmp_path: Path) -> None:
    path = str(write_npy(tmp_path / "t", [500]))

    def at(*steps: int) -> StatefulDataLoader:
        phases = [TrainingPhase(step, lr_scale=0.5) for step in steps]
        config = DataConfig(path, phases=phases, num_workers=0)
        return build_dataloader(config, batch_size=4, seq_len=8, rank=0, world_size=1)

    state = at(10).state_dict()
    at(10).load_state_dict(state)
    for other in (at(20), at(10, 20), at()):
        with pytest.raises(StateMismatch, match=r"phases was \[10\] and is"):
            other.load_state_dict(state)


def test_a_foreign_dataset_is_known_by_type_length_and_a_fingerprint_if_given() -> None:
    state = make(Squares(30)).state_dict()
    make(Squares(30)).load_state_dict(state)
    for other, said in [
        (make(Squares(31)), "samples was 30 and is 31"),
        (make(Pairs(30)), "type was 'Squares' and is 'Pairs'"),
        (make(Squares(30), fingerprint="v2"), "data was None and is 'v2'"),
    ]:
        with pytest.raises(StateMismatch) as refused:
            other.load_state_dict(state)
        assert said in str(refused.value)


def test_distributed_and_resumable_samplers_read_each_others_states() -> None:
    dataset = Taking(30)
    loader = StatefulDataLoader(dataset, 4, DistributedSampler(dataset, 1, 0, seed=42), IN_PROCESS)
    next(iter(loader))
    other = StatefulDataLoader(
        dataset, 4, ResumableDistributedSampler(dataset, drop_last=True), IN_PROCESS
    )
    other.load_state_dict(loader.state_dict())
    assert rest(other, 10) == rest(loader, 10)


# --------------------------------------------------------------------------------- hostile ones


def _without(key: str) -> Callable[[dict[str, Any]], Any]:
    return lambda state: {k: v for k, v in state.items() if k != key}


def _with(**values: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda state: state | values


HOSTILE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "nothing": lambda _: {},
    "none": lambda _: None,
    "a list": list,
    "no position, epoch a word": lambda _: {"epoch": "one", "batches_yielded": 0},
    "no position, no batches": lambda _: {"epoch": 0},
    "no position, sampler a list": lambda _: {"epoch": 0, "batches_yielded": 0, "sampler": []},
    "no position, no ranks": lambda _: {
        "epoch": 0,
        "batches_yielded": 0,
        "sampler": {"num_replicas": 0},
    },
    "negative position": _with(position=-4),
    "position a float": _with(position=4.0),
    "position a bool": _with(position=True),
    "position a word": _with(position="4"),
    "position past int64": _with(position=1 << 63),
    "position a list": _with(position=[4]),
    "no identity": _without("identity"),
    "identity a word": _with(identity="mine"),
    "identity empty": _with(identity={}),
    "no segments": _without("segments"),
    "segments a dict": _with(segments={"0": 1}),
    "segments flat": _with(segments=[0, 4, 1]),
    "segments short": _with(segments=[[0, 4]]),
    "a segment of nothing": _with(segments=[[0, 0, 1]]),
    "segments out of order": _with(segments=[[4, 8, 1], [0, 8, 1]]),
    "a segment past the position": _with(segments=[[0, 8, 1], [800, 8, 1]]),
    "no stages": _without("stages"),
    "stages a number": _with(stages=7),
    "stages with few weights": _with(stages=[[0, [5], 0]]),
    "stages with words": _with(stages=[[0, ["a", "b"], 0]]),
    "stages that start late": _with(stages=[[8, list(OLD), 0]]),
    "stages for three": _with(stages=[[0, list(weights_of(1, 1, 1)), 0]]),
    "stages out of order": _with(stages=[[0, list(OLD), 0], [0, list(OLD), 1]]),
    "stages of a mixture gone": _with(stages=[]),
    "pending a word": _with(pending="b"),
    "pending for three": _with(pending=list(weights_of(1, 1, 1))),
    "pending negative": _with(pending=[-1, 2**32 + 1]),
    "no version": _without("version"),
    "version a word": _with(version="1"),
    "version negative": _with(version=-1),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_damaged_state_is_one_clear_error_and_changes_nothing(what: str) -> None:
    loader = mixed(late=5)
    iterator = iter(loader)
    next(iterator)
    good = loader.state_dict()
    before = copy.deepcopy(good)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(PenstockError) as refused:
            loader.load_state_dict(HOSTILE[what](good))
    assert refused.value.__suppress_context__ or refused.value.__context__ is None
    assert len(str(refused.value)) < 500
    assert loader.state_dict() == before
    assert [places(batch) for batch in iterator] == planned(9, (0, OLD), (5, LATE))[1:]


def test_a_newer_version_is_refused_in_words_whatever_its_keys_are() -> None:
    loader = make()
    for state in ({"version": VERSION + 1}, loader.state_dict() | {"version": VERSION + 1}):
        with pytest.raises(
            StateMismatch, match=f"has version {VERSION + 1}.*reads up to {VERSION}"
        ):
            loader.load_state_dict(state)


def test_version_1_of_the_format_loads_for_good() -> None:
    """The file is what Penstock 0.1 wrote, and is not to be changed."""
    state = json.loads((Path(__file__).parent / "state_v1.json").read_text())
    loader = mixed(late=5)
    loader.load_state_dict(state)
    assert (loader.position, loader.epoch, loader.step) == (24, 0, 3)
    now = weights_of(2, 7)  # asked for while an iterator was under way
    expected = planned(20, (0, OLD), (2, NEW), (5, LATE), (9, now))
    assert rest_of_mixture(loader, 17) == expected[3:]
