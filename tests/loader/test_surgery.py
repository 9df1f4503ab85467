"""Runs that are edited on the way: what was lived stays, what comes is what the edit says."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.loader.support import (
    IN_PROCESS,
    Endless,
    Taking,
    assert_same,
    packed,
    through_json,
    write_store,
)
from tests.loader.surgery_model import SEED, Model, Phases

from penstock import (
    ConfigError,
    DataConfig,
    DistributedSampler,
    MixtureDataset,
    MixtureSampler,
    OutOfBounds,
    Stage,
    StatefulDataLoader,
    StateMismatch,
    TrainingPhase,
    WindowDataset,
    edit_state,
    open_store,
)
from penstock.dataset.excluded import excluding
from penstock.order import quantise

SIZES = {"a": 13, "b": 40, "c": 300, "d": 23, "e": 90}


def ranks(model: Model, world: int) -> list[StatefulDataLoader]:
    """The loaders of the run that a model declares, as `build_dataloader` makes them."""
    names = model.names
    step = model.size * model.accumulation
    stages = [
        Stage(k * step, tuple(weights.get(name, 0) for name in names), k)
        for k, weights in model.phases
    ]
    made = []
    for rank in range(world):
        dataset = MixtureDataset([Taking(SIZES[name]) for name in names], names)
        sampler = MixtureSampler(
            dataset.cumulative_sizes, [], world, rank, seed=SEED, names=names, stages=stages
        )
        made.append(
            StatefulDataLoader(
                dataset,
                model.size // world,
                sampler,
                IN_PROCESS,
                accumulation=model.accumulation,
            )
        )
    return made


class Trained:
    """A run of all its ranks beside the model of it."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.delivered: list[tuple[int, list[tuple[str, int]]]] = []  # (position, samples)
        self.world = 1
        self._open(None)

    def _open(self, state: dict[str, Any] | None, **options: Any) -> None:
        self.loaders = ranks(self.model, self.world)
        for loader in self.loaders:
            if state is not None:
                loader.load_state_dict(state, **options)
        self.iterators = [Endless(loader) for loader in self.loaders]
        first = self.loaders[0]
        if state is not None:
            saved = through_json(first.state_dict())
            again = ranks(self.model, self.world)[0]
            again.load_state_dict(saved)
            assert again.state_dict() == saved
        assert (first.position, first.step) == (self.model.position, self.model.step)

    def state(self) -> dict[str, Any]:
        states = [through_json(loader.state_dict()) for loader in self.loaders]
        for rank, state in enumerate(states):
            assert state == states[0] | {"sampler": states[0]["sampler"] | {"rank": rank}}
        return states[-1]

    def train(self, batches: int) -> None:
        begin, counts = self.model.position, Counter[str]()
        planned = self.loaders[0].plan
        for loader in self.loaders:
            loader._reset_stats()
        for _ in range(batches):
            steps = {loader.step for loader in self.loaders}
            step, position, samples = next(self.model)
            assert steps == {step}
            got: list[Any] = [None] * len(samples)
            for rank, iterator in enumerate(self.iterators):
                batch = next(iterator)
                indices = batch["input_ids"][:, 0].tolist()
                sources = [self.model.names[k] for k in batch["dataset_idx"].tolist()]
                got[rank :: self.world] = list(zip(sources, indices, strict=True))
            assert got == samples
            self.delivered.append((position, samples))
            counts.update(name for name, _ in samples)
        order = self.loaders[0].sampler.order
        end = self.loaders[0].position
        expected = dict(zip(order.names, order.given(planned.kept(begin, end)), strict=True))
        assert {n: c for n, c in expected.items() if c} == dict(counts)
        stats = self.loaders[0].stats()["samples_by_source"]
        assert {n: c for n, c in stats.items() if c} == dict(counts)

    def resume(self, world: int, size: int, accumulation: int) -> None:
        state, self.world = self.state(), world
        self.model.resize(size, accumulation)
        self._open(state)

    def declare(self, names: list[str], phases: Phases) -> None:
        state = self.state()
        self.model.declare(names, phases)
        self._open(state, allow="mixture")

    def edit(self, allow: bool = False, **edits: Any) -> None:
        state = self.state()
        before = json.dumps(state)
        edited = edit_state(state, **edits)
        assert json.dumps(state) == before
        assert len(json.dumps(edited)) < 4000
        if "weights" in edits:
            self.model.weigh(edits["weights"])
        self._open(through_json(edited), **({"allow": "mixture"} if allow else {}))


def _weights(random: Random, names: list[str]) -> dict[str, int]:
    chosen = random.sample(names, random.randint(1, len(names)))
    return dict(zip(chosen, quantise([random.choice([1, 2, 5]) for _ in chosen]), strict=True))


def _phases(random: Random, names: list[str], step: int) -> Phases:
    later = [random.randint(1, step + 12)] if random.random() < 0.4 else []
    return [(k, _weights(random, names)) for k in (0, *later)]


@settings(max_examples=60)
@given(st.randoms(use_true_random=False))
def test_any_history_of_edits_gives_what_a_list_of_the_axis_gives(random: Random) -> None:
    names = random.sample(list(SIZES), random.randint(1, 4))
    model = Model(SIZES, names, _phases(random, names, 0))
    run = Trained(model)
    rewound = False
    for _ in range(random.randint(2, 7)):
        run.train(random.randint(1, 9))
        what = random.choice(["resume", "size", "declare", "weigh", "swap", "skip", "back"])
        if what == "resume":
            run.resume(random.choice([1, 2, 4]), model.size, model.accumulation)
        elif what == "size":
            run.resume(run.world, random.choice([4, 8, 12]), random.choice([1, 2, 3]))
        elif what == "declare":
            names = random.sample(list(SIZES), random.randint(1, 4))
            run.declare(names, _phases(random, names, model.step))
        elif what == "weigh":
            share = {random.choice(model.names): random.choice([0.25, 0.5])}
            in_force = [s for s in model.stages if s.position <= model.position][-1]
            if set(in_force.weights) - set(share):
                run.edit(weights=share)
        elif what == "swap":
            _swap(run, random)
        else:
            back = random.randint(0, model.step) if what == "back" else None
            first = random.randint(model.step if back is None else back, model.step + 6)
            skip = [(first, first + random.randint(0, 5))] if random.random() < 0.8 else []
            if model.position and not (back == 0 and not skip):
                state = run.state()
                rewound |= back is not None
                model.edit(back, skip)
                edited = edit_state(state, back_to=back, skip_steps=skip)
                model._settle()
                run._open(through_json(edited))
    run.train(3)
    if not rewound:
        _each_source_in_its_order(run)


def _swap(run: Trained, random: Random) -> None:
    """Sources added and removed by an edit, then the run that declares what there is then."""
    model = run.model
    fresh = [name for name in SIZES if name not in model.names]
    add = {n: random.choice([0.1, 0.3]) for n in random.sample(fresh, min(len(fresh), 1))}
    remove = random.sample(model.names, random.randint(0, 1))
    stages = [s for s in model.stages if s.position > model.position]
    stages.append([s for s in model.stages if s.position <= model.position][-1])
    if not add or any(not set(s.weights) - set(remove) for s in stages):
        return
    state = run.state()
    edited = edit_state(state, add=add, remove=remove)
    names = [n for n in model.names if n not in remove] + list(add)
    random.shuffle(names)
    model.swap(add, remove, names, [(step, _weights(random, names)) for step, _ in model.phases])
    run._open(through_json(edited), **random.choice([{}, {"allow": "mixture"}]))


def _each_source_in_its_order(run: Trained) -> None:
    """Without a way back, a source gives ordinal after ordinal, but for those that were skipped."""
    model = run.model
    delivered = defaultdict(list)
    for position, samples in run.delivered:
        for i in range(len(samples)):
            name, ordinal = model.at(position + i)
            delivered[name].append(ordinal)
    seen = {position + i for position, samples in run.delivered for i in range(len(samples))}
    left_out = [p for p in range(model.position) if p not in seen]
    for name, ordinals in delivered.items():
        assert ordinals == sorted(set(ordinals))  # nothing twice
        gaps = set(range(ordinals[-1])) - set(ordinals)
        assert gaps <= {model.at(p)[1] for p in left_out if model.at(p)[0] == name}


# ----------------------------------------------------------------------------------- one by one


def mixed(
    sources: dict[str, Any],
    weights: list[float] | None = None,
    *,
    world: int = 1,
    rank: int = 0,
    late: tuple[int, list[float]] | None = None,
    batch_size: Any = 8,
    **more: Any,
) -> StatefulDataLoader:
    names = list(sources)
    dataset = MixtureDataset(list(sources.values()), more.pop("called", names))
    stages = [Stage(0, quantise(weights or [1] * len(names)), 0)]
    if late is not None:
        stages.append(Stage(late[0] * 8, quantise(late[1]), late[0]))
    sampler = MixtureSampler(
        dataset.cumulative_sizes, [], world, rank, seed=SEED, names=names, stages=stages
    )
    config = more.pop("config", IN_PROCESS)
    return StatefulDataLoader(dataset, batch_size, sampler, config, **more)


def single(n: int = 30, batch_size: Any = 4, **more: Any) -> StatefulDataLoader:
    dataset = Taking(n)
    return StatefulDataLoader(
        dataset, batch_size, DistributedSampler(dataset, 1, 0, seed=1), IN_PROCESS, **more
    )


def after(loader: StatefulDataLoader, batches: int) -> dict[str, Any]:
    endless = Endless(loader)
    for _ in range(batches):
        next(endless)
    return through_json(loader.state_dict())


def ab() -> dict[str, Any]:
    return {"a": Taking(40), "b": Taking(25)}


def test_back_to_40_000_leave_out_40_100_to_40_300_and_go_on() -> None:
    whole, loader = single(10**6, 8), single(10**6, 8)
    state = after(loader, 1) | {"position": 45_000 * 8}
    edited = edit_state(state, back_to=40_000, skip_steps=[(40_100, 40_300)])
    assert (edited["step"], edited["position"]) == (40_000, 320_000)
    loader.load_state_dict(through_json(edited))
    whole.load_state_dict(state | {"position": 320_000})
    mine, theirs = iter(loader), iter(whole)
    for step in range(40_000, 40_320):
        assert whole.step == step
        expected = next(theirs)["input_ids"][:, 0].tolist()
        if not 40_100 <= step <= 40_300:
            assert loader.step == step
            assert next(mine)["input_ids"][:, 0].tolist() == expected
    assert len(loader) == 125_000 - 201


def test_a_single_dataset_skips_across_the_end_of_an_epoch_and_its_tail() -> None:
    whole = [b["input_ids"][:, 0].tolist() for _ in range(1) for b in _batches(single(), 21)]
    loader = single()
    edited = edit_state(after(single(), 3), skip_steps=[(5, 8)])
    loader.load_state_dict(edited)
    got = [b["input_ids"][:, 0].tolist() for b in _batches(loader, 14)]
    assert got == whole[3:5] + whole[9:21]
    assert loader.epoch == 3


def _batches(loader: StatefulDataLoader, count: int) -> list[Any]:
    endless = Endless(loader)
    return [next(endless) for _ in range(count)]


def test_steps_left_out_stay_left_out_at_another_batch_size() -> None:
    state = edit_state(after(single(10**4, 8), 2), skip_steps=[(5, 6)])  # positions 40 to 55
    loader = single(10**4, 6)
    loader.load_state_dict(state)
    starts = []
    for _ in range(8):
        starts.append(loader.position)
        next(iter(loader))
    assert starts == [16, 22, 28, 34, 58, 64, 70, 76]  # 52 to 57 would touch them, 34 to 39 not


def test_a_batch_size_schedule_ahead_decides_where_steps_to_skip_lie_with_the_run() -> None:
    def loader() -> StatefulDataLoader:
        return mixed(ab(), batch_size=[(0, 8), (4, 16)])

    state = after(loader(), 2)
    without, run = edit_state(state, skip_steps=[(5, 5)]), loader()
    within = edit_state(state, skip_steps=[(5, 5)], run=run)
    assert (without["skipped"], within["skipped"]) == ([[40, 48]], [[48, 64]])
    assert run.state_dict() == within


def test_the_edits_of_a_state_without_a_batch_need_the_run() -> None:
    state = mixed(ab()).state_dict()
    with pytest.raises(ConfigError, match="does not say what a step takes: pass run"):
        edit_state(state, skip_steps=[3])
    assert edit_state(state, skip_steps=[3], run=mixed(ab()))["skipped"] == [[24, 32]]


def test_learning_rates_follow_the_phase_in_force_after_an_edit() -> None:
    phases = [TrainingPhase(6, {"a": 2}, 0.5)]
    config = DataConfig(num_workers=0, phases=phases)
    loader = mixed(ab(), late=(6, [2, 1]), config=config)
    loader.load_state_dict(edit_state(after(mixed(ab(), late=(6, [2, 1])), 3), weights={"a": 0.1}))
    scales = [loader.lr_scale for _ in iter(loader)][:4]
    loader.load_state_dict(edit_state(loader.state_dict(), weights={"a": 0.3}))
    next(iter(loader))
    assert [*scales, loader.lr_scale] == [1.0, 1.0, 1.0, 0.5, 0.5]


# ------------------------------------------------------------------------------------ refused


def test_a_mixture_that_differs_says_how_to_go_on_with_it() -> None:
    state = after(mixed(ab()), 3)
    for other in (mixed(ab(), [2, 1]), mixed({**ab(), "c": Taking(30)}), mixed({"a": Taking(40)})):
        with pytest.raises(StateMismatch, match=r'mean.*load_state_dict\(state, allow="mixture"\)'):
            other.load_state_dict(state)
        other.load_state_dict(state, allow="mixture")
    with pytest.raises(ConfigError, match="allow is 'mixture' or None, not 'all'"):
        mixed(ab()).load_state_dict(state, allow="all")  # type: ignore[arg-type]


def test_a_source_with_other_data_is_refused_whatever_is_allowed() -> None:
    state = after(mixed(ab()), 3)
    other = mixed({"a": Taking(40), "b": Taking(26), "c": Taking(9)})
    for allow in (None, "mixture"):
        with pytest.raises(StateMismatch, match=r"sources\.b\.samples was 25 and is 26") as refused:
            other.load_state_dict(state, allow=allow)  # type: ignore[arg-type]
        assert "allow=" not in str(refused.value)


def test_a_source_that_comes_back_has_to_be_the_one_that_left() -> None:
    loader = mixed({"a": Taking(40)})
    loader.load_state_dict(after(mixed(ab()), 3), allow="mixture")
    state = after(loader, 2)
    with pytest.raises(StateMismatch, match=r"sources\.b\.samples was 25 and is 30"):
        mixed({"a": Taking(40), "b": Taking(30)}).load_state_dict(state, allow="mixture")
    back = mixed(ab())
    back.load_state_dict(state, allow="mixture")
    assert "retired" not in back.state_dict()


def test_numbered_sources_neither_come_nor_go() -> None:
    unnamed = {"0": Taking(40), "1": Taking(25)}
    state = after(mixed(unnamed, called=["a", "b"]), 2)
    mixed(unnamed, [1, 9], called=["a", "b"]).load_state_dict(state, allow="mixture")
    more = mixed({**unnamed, "2": Taking(9)}, called=["a", "b", "c"])
    with pytest.raises(StateMismatch, match=r"names=dataset\.dataset_names"):
        more.load_state_dict(state, allow="mixture")
    with pytest.raises(ConfigError, match=r"names=dataset\.dataset_names"):
        edit_state(state, remove=["0"])


def test_a_single_dataset_is_no_mixture_whatever_is_allowed() -> None:
    state = after(single(), 2)
    with pytest.raises(StateMismatch, match="belongs to another run"):
        mixed(ab()).load_state_dict(state, allow="mixture")
    for edit in ({"weights": {"data": 1}}, {"add": {"x": 0.5}}, {"remove": ["data"]}):
        with pytest.raises(ConfigError, match="single dataset, which has no sources to weigh"):
            edit_state(state, **edit)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        ({"weights": {"c": 0.5}}, r"'c' is no source of this state; it has \['a', 'b'\]"),
        ({"weights": {"a": 1.0}}, r"leave nothing of 1 for \['b'\]"),
        ({"weights": {"a": -0.1}}, "the weight of 'a' is a number from 0 on, not -0.1"),
        ({"weights": {"a": float("nan")}}, "a number from 0 on, not nan"),
        ({"weights": {"a": 0, "b": 0}}, "no source would be left with a weight"),
        ({"remove": ["a", "b"]}, "no source would be left with a weight"),
        ({"remove": ["c"]}, "'c' is no source"),
        ({"add": {"a": 0.5}}, "'a' is a source already: give it a weight"),
        ({"back_to": 4}, "the run is at step 3: back_to names one before it, not 4"),
        ({"back_to": -1}, "back_to is a whole number >= 0, not -1"),
        ({"skip_steps": [2]}, "the run is at step 3, and 2 has been"),
        ({"skip_steps": [(5, 4)]}, r"skip_steps has ranges \(first, last\), not \(5, 4\)"),
        ({"skip_steps": ["5"]}, "skip_steps is a whole number"),
        ({"exclude": {"c": [1]}}, r"documents of 'c'.*\['a', 'b'\]"),
        ({"exclude": [1]}, "documents of 'data'"),
        ({"exclude": {"a": [(1, 2, 3)]}}, "exclude is a whole number"),
    ],
)
def test_an_edit_that_cannot_be_meant_is_one_clear_error(edit: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        edit_state(after(mixed(ab()), 3), **edit)


def test_the_state_of_a_stream_is_not_edited() -> None:
    state = {"version": 1, "epoch": 0, "row": 8, "lanes": {"0": [0, 0, 0]}, "identity": {}}
    with pytest.raises(StateMismatch, match="state of a stream cannot be edited"):
        edit_state(state, skip_steps=[4])
    with pytest.raises(StateMismatch, match="only the documented keys: load it once"):
        edit_state({"epoch": 0, "batches_yielded": 3}, skip_steps=[4])
    with pytest.raises(StateMismatch, match="this is the state of a stream"):
        single().load_state_dict(state)


def test_a_state_that_needs_a_source_the_run_has_not_is_refused() -> None:
    edited = edit_state(after(mixed(ab()), 3), add={"c": 0.25})
    with pytest.raises(StateMismatch, match=r"takes samples of 'c' from position 24 on.*\['a', 'b"):
        mixed(ab()).load_state_dict(edited)
    late = mixed({**ab(), "c": Taking(9)}, late=(7, [1, 1, 1]))
    with pytest.raises(StateMismatch, match=r"has phases from the steps \[0\] on, and this run"):
        late.load_state_dict(edited, allow="mixture")
    with pytest.raises(ConfigError, match="'c' is to be added, and the run has no such source"):
        edit_state(after(mixed(ab()), 3), add={"c": 0.25}, run=mixed(ab()))


def test_weights_set_by_hand_that_give_way_to_the_runs_are_said_to() -> None:
    edited = edit_state(after(mixed(ab()), 3), weights={"a": 0.9})
    loader = mixed(ab(), [1, 3])
    with pytest.warns(UserWarning, match="set by hand at position 24 give way"):
        loader.load_state_dict(edited, allow="mixture")
    assert loader.sampler.stages[-1].weights == quantise([1, 3])


def test_a_run_is_adopted_before_it_is_edited() -> None:
    three = {**ab(), "c": Taking(30)}
    run = mixed({name: three[name] for name in ("c", "a")}, [1, 1])
    edited = edit_state(
        after(mixed(ab()), 3), add={"c": 0.75}, remove=["b"], skip_steps=[4], run=run
    )
    again = mixed({name: three[name] for name in ("c", "a")}, [1, 1])
    again.load_state_dict(through_json(edited))
    assert again.state_dict() == edited
    assert edited["stages"][-1][1] == list(quantise([0.25, 0, 0.75]))
    assert list(edited["retired"]) == ["b"]


@pytest.mark.parametrize(
    "damage",
    [
        {"sources": ["a"]},
        {"sources": ["a", "a"]},
        {"sources": "ab"},
        {"sources": [1, 2]},
        {"sources": ["a", "x"]},
        {"retired": ["b"]},
        {"retired": {"b": 1}},
        {"since": -1},
        {"since": 999},
        {"skipped": [[1]]},
        {"skipped": [[5, 5]]},
        {"skipped": [[5, 9], [7, 12]]},
        {"skipped": {"5": 9}},
        {"skipped": ["ab"]},
    ],
)
def test_damage_to_what_an_edit_left_is_one_clear_error(damage: dict[str, Any]) -> None:
    loader = mixed(ab())
    state = after(loader, 3)
    with pytest.raises(StateMismatch):
        loader.load_state_dict(state | damage)
    assert loader.state_dict() == state


@pytest.mark.parametrize(
    "excluded",
    [[1], {"a": 3}, {"a": [[1, 2]]}, {"a": [[2, 1, 0]]}, {"a": [[0, 4, 0], [2, 5, 0]]}],
)
def test_damage_to_what_is_excluded_is_one_clear_error(excluded: Any) -> None:
    loader = mixed(ab())
    state = after(loader, 3)
    with pytest.raises(StateMismatch):
        loader.load_state_dict(state | {"identity": state["identity"] | {"excluded": excluded}})
    assert loader.state_dict() == state


# ----------------------------------------------------------------------------------- documents


def stores(root: Path) -> dict[str, Any]:
    """Two sources, one of windows and one of rows."""
    paths = [write_store(root / name, 45, seed=k) for k, name in enumerate(("web", "code"))]
    return {
        "web": WindowDataset(open_store(paths[0]), 8, pack_sequences=True),
        "code": packed(paths[1]),
    }


@pytest.mark.parametrize("workers", ["thread", "process"])
def test_excluded_documents_are_not_trained_after_the_edit_and_all_else_is_as_it_was(
    tmp_path: Path, workers: Any
) -> None:
    sources = stores(tmp_path)
    whole = [mixed(sources, world=2, rank=rank, batch_size=4) for rank in range(2)]
    expected = [_batches(loader, 12) for loader in whole]
    state = after(mixed(sources), 4)
    edited = edit_state(state, exclude={"web": [(0, 20)], "code": [3, (5, 30)]})
    config = DataConfig(num_workers=1 if workers == "process" else 0)
    untrained = 0
    for rank in range(2):
        loader = mixed(sources, world=2, rank=rank, batch_size=4, config=config, workers=workers)
        loader.load_state_dict(edited)
        position = loader.position
        iterator = iter(loader)
        for number in range(4, 10):
            got, original = next(iterator), dict(expected[rank][number])
            at = np.arange(position + rank, position + 8, 2)
            indices = loader.sampler.order.indices(at)
            view = excluding(loader.dataset, {"web": [(0, 21)], "code": [(3, 4), (5, 31)]})
            assert_same(got, view.take(indices))
            assert_same(original, loader.dataset.take(indices))
            changed = got["labels"] != original["labels"]
            assert (got["labels"][changed] == -100).all()
            untrained += int(changed.sum())
            original["labels"] = got["labels"]
            assert_same(got, original)
            position += 8
        iterator.close()  # type: ignore[attr-defined]
        assert loader.stats()["excluded"]["web"]["documents"] == 21
    assert untrained > 100


def test_exclusions_go_with_the_state_and_stay_when_the_run_goes_back(tmp_path: Path) -> None:
    sources = stores(tmp_path)
    edited = edit_state(after(mixed(sources), 6), exclude={"web": [(4, 6)]})
    assert edited["identity"]["excluded"] == {"web": [[4, 7, 48]]}
    loader = mixed(sources)
    loader.load_state_dict(edited)
    assert loader.identity()["excluded"] == {"web": [[4, 7, 48]]}
    assert loader.dataset_at(47) is loader.dataset
    assert loader.dataset_at(48).datasets[0].excluded.documents == 3
    later = edit_state(after(loader, 2), exclude={"web": [(5, 9)], "code": [0]}, back_to=7)
    assert later["identity"]["excluded"] == {
        "web": [[4, 7, 48], [7, 10, 56]],
        "code": [[0, 1, 56]],
    }
    early = edit_state(later, back_to=2)
    assert early["identity"]["excluded"] == {"web": [[4, 10, 16]], "code": [[0, 1, 16]]}
    loader.load_state_dict(early)
    assert loader.state_dict() == early
    loader.load_state_dict(after(mixed(sources), 6))
    assert "excluded" not in loader.identity()
    assert "excluded" not in loader.stats()


def test_exclusions_of_a_source_that_leaves_wait_for_it_to_come_back(tmp_path: Path) -> None:
    sources = stores(tmp_path)
    edited = edit_state(after(mixed(sources), 3), exclude={"web": [1]})
    edited = edit_state(edited, remove=["web"])
    loader = mixed({"code": sources["code"]})
    loader.load_state_dict(edited)
    assert loader.stats()["excluded"] == {}
    back = mixed(sources)
    back.load_state_dict(after(loader, 2), allow="mixture")
    assert back.stats()["excluded"]["web"]["documents"] == 1


def test_a_document_that_is_not_there_is_refused_when_the_state_is_loaded(tmp_path: Path) -> None:
    sources = stores(tmp_path)
    loader = mixed(sources)
    before, edited = (
        loader.state_dict(),
        edit_state(after(mixed(sources), 3), exclude={"web": [45]}),
    )
    with pytest.raises(OutOfBounds, match="45 documents, and 45 is none of them"):
        loader.load_state_dict(edited)
    assert loader.state_dict() == before


def test_a_single_dataset_excludes_documents_by_number_alone(tmp_path: Path) -> None:
    dataset = stores(tmp_path)["web"]
    sampler = DistributedSampler(dataset, 1, 0, seed=1)
    loader = StatefulDataLoader(dataset, 4, sampler, IN_PROCESS)
    loader.load_state_dict(edit_state(after(loader, 2), exclude=[(0, 44)]))
    assert (next(iter(loader))["labels"] == -100).all()
    assert loader.stats()["excluded"] == {
        "data": {"documents": 45, "tokens": dataset.store.total("sequence")}
    }


def test_version_2_of_the_format_loads_for_good(tmp_path: Path) -> None:
    """The file is what Penstock 0.1 wrote, and is not to be changed."""
    state = json.loads((Path(__file__).parent / "state_v2.json").read_text())
    three = {"a": Taking(40), "c": Taking(30)}
    loader = mixed(three, [1, 1], late=(9, [1, 0]))
    loader.load_state_dict(state)
    assert loader.state_dict() == state
    got = []
    for batch in _batches(loader, 4):
        pairs = zip(batch["dataset_idx"].tolist(), batch["input_ids"][:, 0].tolist(), strict=True)
        got.append(" ".join(f"{'ac'[k]}{i}" for k, i in pairs))
    assert loader.step == 13
    assert got == [
        "c5 a37 a31 a8 a13 c15 c11 a29",
        "a39 a30 a26 a9 a1 a36 a23 a22",
        "a5 a32 a38 a28 a34 a24 a6 a35",
        "a4 a17 a5 a18 a24 a1 a20 a11",
    ]
