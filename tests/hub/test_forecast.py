"""Plans of datasets of the Hub: exact once they are tokenized, plain words where they stream."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.hub.support import documents, write
from tests.text.tokenizers_for_tests import gpt2_like

from penstock import ConfigError, DataConfig, HuggingFaceDataset, TrainingPhase
from penstock.forecast import difference, draw, forecast_run
from penstock.forecast.makeup import makeup_of
from penstock.order import EpochOrder
from penstock.run import RunConfig, open_run

T = 32


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "d", "jsonl", "train", documents(60))


def streamed(folder: Path, **options: object) -> RunConfig:
    data = DataConfig(
        hf_dataset_name=str(folder),
        tokenizer_path=str(gpt2_like()),
        hf_streaming=True,
        num_workers=1,
        phases=[TrainingPhase(20, lr_scale=0.5), TrainingPhase(50, lr_scale=0.1)],
    )
    return RunConfig(**{"batch_size": [[0, 2], [10, 3]], "seq_len": T, "data": data} | options)


def test_the_boundaries_of_a_tokenized_dataset_are_counted_from_its_offsets(folder: Path) -> None:
    dataset = HuggingFaceDataset(
        folder, "train", "text", T, gpt2_like(), pack_sequences=True, workers=0
    )
    n = len(dataset)
    labels = makeup_of(dataset, EpochOrder(n, 0), limit=0).between(0, n)
    assert labels.exact
    assert labels.trained == int((dataset.take(list(range(n)))["labels"] != -100).sum())


def test_a_stream_is_planned_by_its_steps(folder: Path) -> None:
    run = streamed(folder, steps=30, world_size=2, accumulation=2)
    forecast = forecast_run(run, step_time=1.0)
    assert forecast.samples == (10 * 2 + 20 * 3) * 2 * 2
    assert forecast.tokens == forecast.samples * T
    assert [(e.step, e.tokens_a_step) for e in forecast.schedule] == [
        (0, 2 * 2 * 2 * T),
        (10, 3 * 2 * 2 * T),
    ]
    assert [(s.first_step, s.end_step, s.lr_scale) for s in forecast.stages] == [
        (0, 20, 1.0),
        (20, 30, 0.5),
    ]
    assert forecast.unreached == (50,)
    stream = forecast.stream
    assert stream is not None
    assert (stream.files, stream.lanes, stream.tokens) == (2, 240, None)
    assert stream.units > 0
    assert "penstock" in stream.note or "name a number of steps" in stream.note
    assert not forecast.labels.exact
    assert forecast.to_dict()["stream"]["files"] == 2


def test_a_stream_without_steps_says_what_is_not_known(folder: Path, tmp_path: Path) -> None:
    run = streamed(folder)
    forecast = forecast_run(run)
    assert (forecast.until, forecast.steps, forecast.total) == ("unknown", None, ())
    with pytest.raises(ConfigError, match="no picture of a stream"):
        draw(tmp_path / "c.png", forecast, "run")
    with pytest.raises(ConfigError, match="streams cannot be compared"):
        difference(run, run)


def test_a_stream_that_was_counted_knows_about_how_long_an_epoch_is(folder: Path) -> None:
    index = pytest.importorskip("penstock.stream.index")
    run = streamed(folder, steps=5)
    loader = open_run(run)
    counts = index.count(loader.dataset.opened())
    stream = forecast_run(run).stream
    assert stream is not None
    assert stream.tokens == counts.tokens
    assert stream.epochs == pytest.approx(5 * 2 * (T + 1) / counts.tokens)
    loader.dataset.close()


def test_what_is_left_of_a_stream_after_a_state(folder: Path) -> None:
    run = streamed(folder, steps=15)
    loader = open_run(run)
    batches = iter(loader)
    for _ in range(12):
        next(batches)
    forecast = forecast_run(run, state=loader.state_dict())
    assert (forecast.first_step, forecast.samples) == (12, 3 * 3)
    with pytest.raises(ConfigError, match="nothing is left"):
        forecast_run(streamed(folder, steps=12), state=loader.state_dict())
    loader.dataset.close()
