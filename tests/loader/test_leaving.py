"""However a loop is left, nothing stays behind; and an error names the sample it comes from."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.loader.support import (
    Kind,
    Squares,
    children,
    make_kinds,
    no_children_after,
    shared_memory,
    threads_of_ours,
)

from penstock import DataConfig, DistributedSampler, MixtureDataset, StatefulDataLoader
from penstock.dataset.base import SampleDataset
from penstock.loader import ahead

ROOT = Path(__file__).parents[2]
MODES = {  # dataset, workers: batches made here, with threads reading ahead, in processes
    "here": ("items", "thread"),
    "threads": ("windows", "auto"),
    "processes": ("items", "auto"),
    "windows in processes": ("windows", "process"),
}


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Kind]:
    return make_kinds(tmp_path_factory.mktemp("kinds"))


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    before = shared_memory()
    yield
    assert threads_of_ours() == []
    assert no_children_after(children)
    assert no_children_after(lambda: shared_memory() - before)


def make(
    dataset: Any, mode: str = "auto", *, workers: int = 2, seed: int = 1
) -> StatefulDataLoader:
    sampler = DistributedSampler(dataset, 1, 0, seed=seed)
    config = DataConfig(num_workers=workers)
    return StatefulDataLoader(dataset, 4, sampler, config, workers=mode)


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is gathered, the loader thinks that it had to come from disk, and reads ahead."""
    monkeypatch.setattr(ahead, "SLOW_SAMPLE", -1.0)


@pytest.fixture(params=MODES)
def loader(
    request: pytest.FixtureRequest, kinds: dict[str, Kind], slow_disk: None
) -> StatefulDataLoader:
    name, workers = MODES[request.param]
    return make(kinds[name].dataset, workers)


# -------------------------------------------------------------------------------------- leaving


def test_the_end_of_an_epoch_closes_everything(loader: StatefulDataLoader) -> None:
    assert len(list(loader)) == len(loader)
    assert threads_of_ours() == []
    assert no_children_after(children)


def test_threads_and_processes_are_there_while_a_loop_runs(loader: StatefulDataLoader) -> None:
    for number, _ in enumerate(loader):
        busy = len(threads_of_ours()) + len(children())
        if number == 3:
            assert busy == (0 if loader._in_process and not loader._grouped else 2)
            break


def test_break_leaves_nothing(loader: StatefulDataLoader) -> None:
    for number, _ in enumerate(loader):
        if number == 3:
            break
    assert threads_of_ours() == []
    assert no_children_after(children)


def test_an_exception_in_the_training_loop_leaves_nothing_even_while_it_is_held(
    loader: StatefulDataLoader,
) -> None:
    def train() -> None:
        for number, _ in enumerate(loader):
            if number == 2:
                raise FloatingPointError("loss is NaN")

    with pytest.raises(FloatingPointError) as held:
        train()
    at = loader.state_dict()["position"]
    assert at == 12
    del held


def test_an_abandoned_iterator_leaves_nothing(loader: StatefulDataLoader) -> None:
    iterator = iter(loader)
    next(iterator)
    del iterator
    assert threads_of_ours() == []
    assert no_children_after(children)
    unused = iter(loader)
    del unused
    assert loader.position == 4


def test_two_iterators_at_once_leave_nothing(loader: StatefulDataLoader) -> None:
    first, second = iter(loader), iter(loader)
    next(first), next(second), next(first)
    assert loader.position == 12
    del first, second


# --------------------------------------------------------------------------------------- errors


class Broken(Squares):
    """One sample of it cannot be had."""

    def __init__(self, bad: int) -> None:
        super().__init__(40)
        self.bad = bad

    def __getitem__(self, index: int) -> Any:
        if index == self.bad:
            raise OSError(f"cannot read {index}")
        return super().__getitem__(index)


class BrokenTaking(SampleDataset):
    """The same, taking batches."""

    def __init__(self, bad: int, *, bad_advice: bool = False) -> None:
        self.items, self.bad_advice = Broken(bad), bad_advice

    def __len__(self) -> int:
        return 40

    def take(self, indices: Any) -> Any:
        return {"input_ids": torch.stack([self.items[int(i)]["input_ids"] for i in indices])}

    def advise(self, indices: Any) -> None:
        if self.bad_advice:
            raise OSError("cannot advise")


class BrokenGroups(BrokenTaking):
    """The same, of which several batches are gathered at once."""

    sample_bytes = 8

    def gather(self, indices: Any) -> Any:
        self.take(indices)
        return super().gather(indices)


def said(error: BaseException) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


@pytest.mark.parametrize("workers", ["thread", "process"])
@pytest.mark.parametrize("kind", [Broken, BrokenTaking, BrokenGroups])
def test_an_exception_in_a_dataset_names_the_sample(kind: Any, workers: str) -> None:
    loader = make(kind(23), workers)
    order = loader.sampler.order.indices(np.arange(40)).tolist()
    delivered = 0
    with pytest.raises(OSError, match="cannot read 23") as caught:  # noqa: PT012 - it is counted
        for _ in loader:
            delivered += 1
    assert f"raised by sample 23 of {kind.__name__}" in said(caught.value)
    assert delivered <= order.index(23) // 4
    assert loader.position == delivered * 4
    assert threads_of_ours() == []
    assert no_children_after(children)  # though the exception is still held
    del caught


def test_an_exception_in_a_mixture_names_the_sample() -> None:
    dataset = MixtureDataset([Squares(10), Broken(7)], ["good", "bad"])
    with pytest.raises(OSError, match="cannot read 7") as caught:
        list(make(dataset, "thread"))
    assert "raised by sample 17 of MixtureDataset" in said(caught.value)


def test_an_exception_while_reading_ahead_reaches_the_trainer(slow_disk: None) -> None:
    with pytest.raises(OSError, match="cannot advise"):
        list(make(BrokenTaking(99, bad_advice=True)))


def test_the_state_after_an_error_goes_on_at_the_batch_that_failed() -> None:
    loader = make(Broken(23), "thread", workers=0)
    whole = [batch["square"].tolist() for batch in make(Squares(40), "thread")]
    got = []
    with pytest.raises(OSError, match="cannot read"):
        got += [batch["square"].tolist() for batch in loader]
    loader.dataset.bad = -1
    assert got + [batch["square"].tolist() for batch in loader] == whole[len(got) :] or got == []


# torch raises from a signal handler, which may be in the middle of connecting to the dead worker.
@pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <socket:pytest.PytestUnraisableExceptionWarning"
)
def test_a_worker_process_that_dies_is_an_error_and_not_a_hang() -> None:
    class Deadly(Squares):
        def __getitem__(self, index: int) -> Any:
            if index == 23:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__getitem__(index)

    with pytest.raises(RuntimeError, match="DataLoader worker"):
        list(make(Deadly(40)))


# ------------------------------------------------------------------------------------- Ctrl-C

CTRL_C = """
import json, sys, threading, time
import psutil
from penstock import DataConfig, DistributedSampler, StatefulDataLoader
from tests.loader.support import Squares, children, no_children_after, threads_of_ours
from penstock import MemoryMappedDataset

mode, folder = sys.argv[1:]
dataset = MemoryMappedDataset(folder, 3) if mode == "threads" else Squares(100_000)
sampler = DistributedSampler(dataset, 1, 0)
loader = StatefulDataLoader(dataset, 4, sampler, DataConfig(num_workers=2))
try:
    while True:
        for number, batch in enumerate(loader):
            if number == 5:
                print(json.dumps(children()), flush=True)
            time.sleep(0.001)
except KeyboardInterrupt:
    left = no_children_after(children)
    print(json.dumps([left, threads_of_ours(), loader.position > 0]), flush=True)
    raise
"""


@pytest.mark.parametrize("mode", ["threads", "processes"])
def test_ctrl_c_ends_threads_and_processes(mode: str, kinds: dict[str, Kind]) -> None:
    folder = str(kinds["windows"].dataset.store.path)
    process = subprocess.Popen(
        [sys.executable, "-c", CTRL_C, mode, folder],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        start_new_session=True,  # a group of its own, as a shell gives a job
    )
    assert process.stdout is not None
    workers = json.loads(process.stdout.readline())
    assert len(workers) == (2 if mode == "processes" else 0)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert json.loads(out) == [True, [], True]
    assert "KeyboardInterrupt" in err
    assert "Exception ignored" not in err
    assert process.returncode in (130, -signal.SIGINT)
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


# ---------------------------------------------------------------------------- the trainer's luck


def test_the_trainers_random_state_is_left_alone(loader: StatefulDataLoader) -> None:
    def luck() -> tuple[Any, ...]:
        numpy = np.random.get_state()  # noqa: NPY002 - the global state is what this is about
        return torch.get_rng_state().tolist(), numpy[1].tolist(), numpy[2:], random.getstate()

    before = luck()
    for _ in loader:
        assert luck() == before
    state = loader.state_dict()
    loader.load_state_dict(state)
    for number, _ in enumerate(loader):
        if number == 1:
            break
    assert luck() == before
