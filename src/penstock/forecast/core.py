"""From a run to its forecast: the loader of one rank is built, and asked rather than iterated."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from penstock.dataset import MixtureDataset, PackedDataset
from penstock.dataset.tokens import TOKENS, TokenDataset
from penstock.errors import ConfigError
from penstock.forecast.caps import caps_of
from penstock.forecast.makeup import Labels, Makeup, makeup_of
from penstock.forecast.needs import disk_of, memory_of, plan_bytes, reading_of
from penstock.forecast.report import (
    Amount,
    Course,
    Forecast,
    ScheduleEntry,
    SourceFacts,
    StageForecast,
)
from penstock.forecast.spans import Axis, Span
from penstock.forecast.streams import forecast_stream
from penstock.loader import StatefulDataLoader
from penstock.loader.streaming import StreamLoader
from penstock.order import MixtureOrder
from penstock.order.mixture import BLOCK
from penstock.order.weights import TOTAL
from penstock.run import RunConfig, open_run

LISTED = 100  # times that a source begins to repeat: more are counted, not listed
DRAWN = 160  # steps of a stage that its course is drawn through, at most
Told = Callable[[str, int, int], None]


def forecast_loader(
    run: RunConfig,
    loader: StatefulDataLoader,
    *,
    step_time: float | None = None,
    count: bool = False,
    limit: int | None = None,
    progress: Told | None = None,
) -> Forecast:
    """What a loader's run delivers from where it stands on."""
    begin, first = loader.position, loader.step
    until, last = _end(run, loader)
    end = loader.plan.position_of(last)
    axis = Axis.of(loader, begin, end)
    names, datasets = sources_of(loader)
    makeups = [
        _made(axis, k, name, dataset, count=count, limit=limit, progress=progress)
        for k, (name, dataset) in enumerate(zip(names, datasets, strict=True))
    ]
    seen = _Seen(axis, names, makeups, run.seq_len)
    stages = tuple(_stages(loader, axis, seen, begin, end))
    total = seen.amounts(begin, end, None)
    facts = tuple(
        _facts(axis, k, name, dataset, makeup, (begin, end))
        for k, (name, dataset, makeup) in enumerate(zip(names, datasets, makeups, strict=True))
    )
    made = Forecast(
        run=run,
        until=until,
        first_step=first,
        last_step=last,
        begin=begin,
        end=end,
        total=total,
        stages=stages,
        sources=facts,
        schedule=tuple(_schedule(axis, run, first, last)),
        epoch_steps=_epoch_steps(axis, begin),
        tail_an_epoch=0 if axis.plan.tail != "drop" else axis.plan.n % axis.plan.segment(end).size,
        dropped=_dropped(axis, begin, end),
        disk=disk_of(run.data, datasets),
        memory=memory_of(loader, run, datasets),
        reading=reading_of(axis, run, datasets, stages, step_time),
        step_time=step_time,
        unreached=tuple(
            stage.start_step for stage in axis.stages if stage.position >= end and stage.start_step
        ),
        caps=(),
        course=tuple(_course(axis, stage) for stage in stages),
    )
    return replace(made, caps=tuple(caps_of(made, axis, datasets)))


def forecast_run(
    run: RunConfig,
    *,
    state: Mapping[str, Any] | None = None,
    step_time: float | None = None,
    count: bool = False,
    limit: int | None = None,
    progress: Told | None = None,
) -> Forecast:
    """What a run will deliver and need, from its start or from a saved state on.

    All of it is arithmetic on the run's order, but for the labels that are trained: where neither
    a ledger nor a look at `limit` bytes of a source (64 MiB) tells those, they are estimates, and
    say so. With `count` all data is looked at, and nothing is an estimate. `progress` is told the
    name of a source, how many of its samples have been looked at just now, and how many it has.
    """
    if step_time is not None and not step_time > 0:
        raise ConfigError(f"a step takes a number of seconds above 0, not {step_time}")
    loader = open_run(run)
    if isinstance(loader, StreamLoader):
        return forecast_stream(run, loader, state, step_time)
    if state is not None:
        load_state(loader, state)
    return forecast_loader(
        run, loader, step_time=step_time, count=count, limit=limit, progress=progress
    )


def load_state(loader: StatefulDataLoader, state: Mapping[str, Any]) -> None:
    """Go on from a state, an edited one too."""
    load: Any = loader.load_state_dict
    if "allow" in inspect.signature(load).parameters:
        load(dict(state), allow="mixture")
    else:
        load(dict(state))


def sources_of(loader: StatefulDataLoader) -> tuple[list[str], list[TokenDataset]]:
    """Names and datasets that a loader draws from."""
    dataset = loader.dataset_at(loader.position)
    if isinstance(dataset, MixtureDataset):
        return dataset.dataset_names, dataset.datasets
    store = dataset.store
    return [store.path.name if store.path else "data"], [dataset]


def _end(run: RunConfig, loader: StatefulDataLoader) -> tuple[str, int]:
    """(why there, the step before which the plan ends)."""
    if run.steps is not None:
        last, until = run.steps, "steps"
        if last <= loader.step:
            raise ConfigError(
                f"the run has {last:,} steps and the state is at step {loader.step:,}: nothing is "
                "left to plan; give more --steps"
            )
    else:
        last = max(loader.plan.step_at((loader.epoch + 1) * loader.plan.n), loader.step + 1)
        until = "epoch"
    return until, last


def _epoch_steps(axis: Axis, begin: int) -> float:
    """Steps of the epoch that the plan begins in."""
    return axis.plan.epoch_batches(begin) / axis.plan.segment(begin).accumulation


def _made(
    axis: Axis,
    k: int,
    name: str,
    dataset: TokenDataset,
    *,
    count: bool,
    limit: int | None,
    progress: Told | None,
) -> Makeup:
    told: Callable[[int], None] | None = None
    if progress is not None:
        tell, of = progress, len(dataset)

        def told(done: int) -> None:
            tell(name, done, of)

    return makeup_of(dataset, axis.source(k), count=count, limit=limit, progress=told)


class _Seen:
    """What each source gives in a stretch of the run."""

    def __init__(self, axis: Axis, names: list[str], makeups: list[Makeup], seq_len: int) -> None:
        self._axis, self._names, self._makeups, self._seq_len = axis, names, makeups, seq_len

    def amounts(
        self, begin: int, end: int, planned: tuple[float, ...] | None
    ) -> tuple[Amount, ...]:
        """Of each source."""
        drawn = self._axis.drawn(begin, end)
        total = sum(b - a for spans in drawn for a, b in spans)
        shares = planned or (None,) * len(drawn)
        each = zip(self._names, drawn, self._makeups, shares, strict=True)
        return tuple(
            self._amount(name, spans, makeup, total, share) for name, spans, makeup, share in each
        )

    def _amount(
        self, name: str, spans: list[Span], makeup: Makeup, total: int, share: float | None
    ) -> Amount:
        samples = sum(b - a for a, b in spans)
        labels = Labels()
        for a, b in spans:
            labels += makeup.between(a, b)
        return Amount(
            name=name,
            samples=samples,
            share=samples / total if total else 0.0,
            planned=share,
            tokens=samples * self._seq_len,
            labels=labels,
            epochs=samples / max(makeup.order.n, 1),
        )


def _stages(
    loader: StatefulDataLoader, axis: Axis, seen: _Seen, begin: int, end: int
) -> list[StageForecast]:
    found = []
    starts = [stage.position for stage in axis.stages]
    declared = 0
    for stage, stop in zip(axis.stages, [*starts[1:], end], strict=True):
        declared = declared if stage.start_step is None else stage.start_step
        a, b = max(stage.position, begin), min(stop, end)
        steps = axis.steps(a, b)
        if steps is None:
            continue
        found.append(
            StageForecast(
                declared=stage.start_step,
                first_step=steps[0],
                end_step=steps[1],
                begin=a,
                end=b,
                lr_scale=loader.config.lr_scale(declared),
                sources=seen.amounts(a, b, tuple(w / TOTAL for w in axis.weights(stage))),
            )
        )
    return found


def _facts(
    axis: Axis, k: int, name: str, dataset: TokenDataset, makeup: Makeup, span: Span
) -> SourceFacts:
    n, store = len(dataset), dataset.store
    before, after = axis.given(span[0])[k], axis.given(span[1])[k]
    cropped, unused = _left_out(dataset)
    first = max(-(-before // max(n, 1)), 1)  # the first epoch that may begin from here on
    repeats = range(first, -(-after // max(n, 1)))
    steps = []
    for epoch in repeats[:LISTED]:
        at = axis.draws_at(k, epoch * n, span[1])
        assert at is not None
        steps.append(axis.step_of(at))
    return SourceFacts(
        name=name,
        path=None if store.path is None else str(store.path),
        samples=n,
        tokens=store.total(TOKENS),
        cropped=cropped,
        unused=unused,
        how=makeup.how,
        epochs_before=before / max(n, 1),
        epochs_after=after / max(n, 1),
        seen=-(-after // max(n, 1)),
        repeats=len(repeats),
        repeats_at=tuple(steps),
        plan_bytes=plan_bytes(dataset),
        ledger=dict(store.metadata.get("ledger") or {}),
    )


def _left_out(dataset: TokenDataset) -> tuple[int, int]:
    """Tokens of the store that are in no sample: cropped off documents, and left at ends."""
    if isinstance(dataset, PackedDataset):
        return dataset.plan.ledger.cropped, dataset.plan.ledger.dropped
    n, total = len(dataset), dataset.store.total(TOKENS)
    stride = getattr(dataset, "stride", dataset.width)
    return 0, total - (n * stride + dataset.width - stride)


def _schedule(axis: Axis, run: RunConfig, first: int, last: int) -> list[ScheduleEntry]:
    found = []
    segments = axis.plan.segments
    for segment, after in zip(segments, [*segments[1:], None], strict=True):
        if (after is not None and after.step <= first) or segment.step >= last:
            continue
        found.append(
            ScheduleEntry(
                step=max(segment.step, first),
                position=segment.position,
                global_batch=segment.size,
                accumulation=segment.accumulation,
                tokens_a_step=segment.size * segment.accumulation * run.seq_len,
            )
        )
    return found


def _course(axis: Axis, stage: StageForecast) -> Course:
    """A stage at evenly spaced steps; a block of positions or more from one to the next."""
    first, last = stage.first_step, stage.end_step
    assert last is not None
    count = min(max((stage.end - stage.begin) // BLOCK, 1), DRAWN, last - first)
    steps = [first + (last - first) * i // count for i in range(count + 1)]
    positions = [stage.begin, *map(axis.plan.position_of, steps[1:-1]), stage.end]
    return Course(
        steps=tuple(steps), given=tuple(tuple(axis.given(position)) for position in positions)
    )


def _dropped(axis: Axis, begin: int, end: int) -> int:
    """Samples left out at the ends of the epochs that the plan goes past."""
    if isinstance(axis.order, MixtureOrder):
        return 0
    return end - begin - sum(b - a for a, b in axis.delivered)
