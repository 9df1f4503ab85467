"""The forecast of a stream: what is known before anything is read, and what an index adds.

How many rows an epoch has depends on every document's tokens. `penstock index` counts them once;
without it, a stream is planned by steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.forecast.makeup import Labels
from penstock.forecast.needs import NARROW, WIDE
from penstock.forecast.report import (
    Amount,
    Disk,
    Forecast,
    Memory,
    Reading,
    ScheduleEntry,
    StageForecast,
    StreamFacts,
)
from penstock.loader.streaming import StreamLoader
from penstock.run import RunConfig
from penstock.stream import TextStream

INDEX = "penstock.stream.index"


def forecast_stream(
    run: RunConfig,
    loader: StreamLoader,
    state: Mapping[str, Any] | None,
    step_time: float | None,
) -> Forecast:
    """What a stream will deliver in so many steps."""
    stream = loader.dataset.opened()
    if state is not None:
        loader.load_state_dict(dict(state))
    first, last = loader.step, run.steps
    if last is not None and last <= first:
        raise ConfigError(
            f"the run has {last:,} steps and the state is at step {first:,}: nothing is left to "
            "plan; give more --steps"
        )
    epoch, note = _counted(stream)
    ends = [*(step for step, _ in run.schedule[1:]), last]
    schedule, amounts, samples = [], [], 0
    for (step, size), end in zip(run.schedule, ends, strict=True):
        a, b = max(step, first), end if last is None or end is None else min(end, last)
        if b is not None and a >= b:
            continue
        rows = size * run.world_size
        schedule.append(
            ScheduleEntry(
                step=a,
                position=samples,
                global_batch=rows,
                accumulation=run.accumulation,
                tokens_a_step=rows * run.accumulation * run.seq_len,
            )
        )
        samples += 0 if b is None or last is None else (b - a) * rows * run.accumulation
    name = str(run.data.hf_dataset_name)
    tokens = samples * run.seq_len
    rows_an_epoch = None if epoch is None else epoch / (run.seq_len + 1)
    amounts = [
        Amount(
            name=name,
            samples=samples,
            share=1.0,
            planned=1.0,
            tokens=tokens,
            labels=Labels(trained=tokens, how="document boundaries and padding not known"),
            epochs=samples / rows_an_epoch if rows_an_epoch else 0.0,
        )
    ]
    largest = max(entry.global_batch * entry.accumulation for entry in schedule)
    text = stream.corpus.bytes
    return Forecast(
        run=run,
        until="steps" if last is not None else "unknown",
        first_step=first,
        last_step=last,
        begin=0,
        end=None if last is None else samples,
        total=tuple(amounts) if last is not None else (),
        stages=tuple(_stages(loader, first, last)),
        sources=(),
        schedule=tuple(schedule),
        epoch_steps=None if rows_an_epoch is None else rows_an_epoch / largest,
        tail_an_epoch=0,
        dropped=0,
        disk=Disk(stores=_local_bytes(stream), plans=0),
        memory=_memory(run),
        reading=_reading(run, largest, text, epoch, step_time),
        step_time=step_time,
        unreached=tuple(
            phase.start_step
            for phase in run.data.active_phases
            if last is not None and phase.start_step >= last
        ),
        caps=(),
        stream=StreamFacts(
            dataset=name,
            files=len(stream.corpus.files),
            units=len(stream.corpus.units),
            lanes=stream.share.lanes,
            documents=stream.corpus.documents,
            text_bytes=text,
            tokens=epoch,
            epochs=samples / rows_an_epoch if rows_an_epoch else None,
            note=note,
        ),
    )


def _counted(stream: TextStream) -> tuple[int | None, str]:
    """Tokens of an epoch if they have been counted; and how they are known, or could be."""
    if find_spec(INDEX) is None:
        return None, (
            "how many steps an epoch has depends on every document's tokens, which nothing has "
            "counted: name a number of steps, or leave hf_streaming out, and the dataset is "
            "tokenized once"
        )
    index = import_module(INDEX)
    try:
        counts = index.counts_of(stream)
    except ConfigError as error:
        return None, str(error)
    return int(counts.tokens), (
        "tokens are counted; the last row of each lane is padded, so a pass has up to "
        f"{stream.share.lanes:,} rows more"
    )


def _stages(loader: StreamLoader, first: int, last: int | None) -> list[StageForecast]:
    """Phases of a stream, which change the learning rate alone."""
    phases = [phase.start_step for phase in loader.config.active_phases]
    starts = [0, *phases] if not phases or phases[0] else phases
    found = []
    for start, end in zip(starts, [*starts[1:], last], strict=True):
        stop = last if end is None else end if last is None else min(end, last)
        begin = max(start, first)
        if stop is not None and begin >= stop:
            continue
        found.append(
            StageForecast(
                declared=start if start in phases else None,
                first_step=begin,
                end_step=stop,
                begin=0,
                end=0,
                lr_scale=loader.config.lr_scale(start),
                sources=(),
            )
        )
    return found


def _local_bytes(stream: TextStream) -> int:
    paths = [Path(file.path) for file in stream.corpus.files]
    return sum(path.stat().st_size for path in paths if path.is_file())


def _memory(run: RunConfig) -> Memory:
    cells = max(size for _, size in run.schedule) * run.seq_len
    packed = 2 * NARROW * cells if run.data.pack_sequences else 0
    return Memory(mapped=0, batch=2 * WIDE * cells + packed, group=0, ahead=0)


def _reading(
    run: RunConfig, largest: int, text: int, tokens: int | None, step_time: float | None
) -> Reading | None:
    """Text read in a step, on average: known where the tokens that it comes to are."""
    if not tokens:
        return None
    step = round(largest * run.seq_len * text / tokens)
    rate = None if step_time is None else step / step_time
    return Reading(
        step=step,
        rank=-(-step // run.world_size),
        pages=step,
        rate=rate,
        pages_rate=rate,
        tokens_rate=None if step_time is None else largest * run.seq_len / step_time,
    )
