"""What is planned is what is delivered: forecasts against loaders that are run on every rank."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.loader.support import EOS, Endless, through_json, write_npy, write_store

from penstock import (
    ConfigError,
    DataConfig,
    DatasetSource,
    MixtureDataset,
    ShardWriter,
    TrainingPhase,
)
from penstock.forecast import Forecast, forecast_run
from penstock.forecast.makeup import AVERAGE
from penstock.run import RunConfig, open_run


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a few rows of random masks have no label
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five sources, of every kind that a [data] table can name here, and a tokenizer."""
    root = tmp_path_factory.mktemp("data")
    write_npy(root / "files", [700, 300])
    write_npy(root / "file", [501], seed=5)
    write_store(root / "masked", 90)
    write_store(root / "plain", 60, masked=False, seed=2)
    write_store(root / "small", 20, seed=3)
    (root / "tokenizer").mkdir()
    vocabulary = {"<eos>": EOS, "last": 59_999}
    model = {"model": {"type": "BPE", "vocab": vocabulary}, "added_tokens": []}
    (root / "tokenizer" / "tokenizer.json").write_text(json.dumps(model))
    (root / "tokenizer" / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    return root


SOURCES = ["files", "file", "masked", "plain", "small"]


# --------------------------------------------------------------------------------------- delivered


@dataclass
class Delivered:
    """What loaders gave, by stage and source."""

    samples: dict[tuple[int, int], int] = field(default_factory=dict)
    trained: dict[tuple[int, int], int] = field(default_factory=dict)
    repeats: dict[int, list[int]] = field(default_factory=dict)
    tokens: int = 0

    def of(self, name: str, source: int, stage: int | None) -> int:
        found: dict[tuple[int, int], int] = getattr(self, name)
        return sum(v for (s, k), v in found.items() if k == source and stage in (None, s))


def deliver(run: RunConfig, state: dict[str, Any] | None = None) -> Delivered:
    """Run the loaders of all ranks up to the run's last step."""
    loaders = [open_run(run, rank) for rank in range(run.world_size)]
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(state)
    ranks = [Endless(loader) for loader in loaders]
    first, found = loaders[0], Delivered()
    starts = [stage.position for stage in first.stages]
    mixed = isinstance(first.dataset, MixtureDataset)
    sizes = [len(each) for each in (first.dataset.datasets if mixed else [first.dataset])]
    given = dict(enumerate(first.sampler.order.counts(first.position) if mixed else [0]))
    assert run.steps is not None
    while first.step < run.steps:
        step = first.step
        batches = [next(rank) for rank in ranks]
        at = first._last
        for rank, batch in enumerate(batches):
            found.tokens += batch["input_ids"].numel()
            trained = (batch["labels"] != -100).sum(1).tolist()
            sources = batch["dataset_idx"].tolist() if mixed else [0] * len(trained)
            for row, (source, labels) in enumerate(zip(sources, trained, strict=True)):
                position = at + rank + row * run.world_size
                stage = int(np.searchsorted(starts, position, "right")) - 1
                key = stage, source
                found.samples[key] = found.samples.get(key, 0) + 1
                found.trained[key] = found.trained.get(key, 0) + labels
                before, given[source] = given[source], given[source] + 1
                if mixed and before and before % sizes[source] == 0:
                    found.repeats.setdefault(source, []).append(step)
        if not mixed and at and at % sizes[0] == 0:  # its tails are dropped
            found.repeats.setdefault(0, []).append(step)
    return found


def assert_delivered(forecast: Forecast, got: Delivered, starts: list[int]) -> None:
    assert forecast.tokens == got.tokens
    for k, amount in enumerate(forecast.total):
        assert amount.samples == got.of("samples", k, None)
        if amount.labels.exact:
            assert amount.labels.trained == got.of("trained", k, None)
        assert amount.labels.total == amount.tokens
    for stage in forecast.stages:
        number = int(np.searchsorted(starts, stage.begin, "right")) - 1
        for k, amount in enumerate(stage.sources):
            assert amount.samples == got.of("samples", k, number)
            if amount.labels.exact:
                assert amount.labels.trained == got.of("trained", k, number)


@st.composite
def runs(draw: st.DrawFn, root: Path) -> RunConfig:
    """A run over some of the sources, its phases, sizes and seed drawn."""
    steps = draw(st.integers(1, 40))
    packing = draw(st.sampled_from([None, None, "concat", "best_fit_crop", "bfd_split", "bfd"]))
    names = draw(st.lists(st.sampled_from(SOURCES), min_size=1, max_size=3, unique=True))
    options: dict[str, Any] = {"tokenizer_path": str(root / "tokenizer"), "packing": packing}
    options["pack_sequences"] = draw(st.booleans())
    weights = st.sampled_from([0.05, 1.0, 3.0])
    if len(names) == 1 and draw(st.booleans()):
        options["dataset_path"] = str(root / names[0])
    else:
        options["datasets"] = [DatasetSource(str(root / n), draw(weights)) for n in names]
        options["mix_temperature"] = draw(st.sampled_from([1.0, 2.0]))
        options["weights_count"] = draw(st.sampled_from(["samples", "tokens"]))
        at = sorted(draw(st.sets(st.integers(0, 40), max_size=2)))
        options["phases"] = [TrainingPhase(s, {draw(st.sampled_from(names)): 0.5}) for s in at]
    sizes = st.integers(1, 4)
    schedule = [[0, draw(sizes)]]
    if draw(st.booleans()):
        schedule.append([draw(st.integers(1, 20)), draw(sizes)])
    return RunConfig(
        batch_size=schedule,
        seq_len=draw(st.sampled_from([7, 16])),
        seed=draw(st.integers(0, 3)),
        world_size=draw(st.integers(1, 3)),
        accumulation=draw(st.integers(1, 2)),
        steps=steps,
        data=DataConfig(num_workers=0, **options),
    )


@settings(max_examples=60)
@given(drawn=st.data())
def test_what_is_planned_is_what_is_delivered(data: Path, drawn: st.DataObject) -> None:
    run = drawn.draw(runs(data))
    limit = drawn.draw(st.sampled_from([0, 1 << 20]))
    forecast = forecast_run(run, limit=limit)
    starts = [stage.position for stage in open_run(run).stages]
    got = deliver(run)
    assert_delivered(forecast, got, starts)
    for k, facts in enumerate(forecast.sources):
        assert list(facts.repeats_at) == got.repeats.get(k, [])
    counted = forecast_run(run, limit=limit, count=True)
    assert counted.labels.exact
    assert_delivered(counted, got, starts)
