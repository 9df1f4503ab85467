"""Caps: the step at which a source is gone through more often than its `max_epochs` allows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from decimal import ROUND_DOWN, Decimal
from fractions import Fraction
from math import floor, log10

from penstock.build import stages_of
from penstock.config import DataConfig, resolve
from penstock.dataset.tokens import TokenDataset
from penstock.errors import ConfigError
from penstock.forecast.report import Cap, Forecast
from penstock.forecast.spans import Axis
from penstock.order import MixtureOrder

DIGITS = 3  # of a weight that is proposed
HALVINGS = 40


def caps_of(forecast: Forecast, axis: Axis, datasets: Sequence[TokenDataset]) -> Iterator[Cap]:
    """The caps that the plan goes past."""
    data, end = forecast.run.data, forecast.end
    assert end is not None
    if not isinstance(axis.order, MixtureOrder):
        return
    names = [axis.order.names[column] for column in axis.columns]
    for source in data.datasets:
        if source.max_epochs is None:
            continue
        k = names.index(source.source_name)
        size = axis.sizes[k]
        allowed = floor(Fraction(source.max_epochs) * size)
        at = axis.draws_at(k, allowed, end)
        if at is None:
            continue
        epochs = axis.given(end)[k] / size
        step = axis.step_of(at)
        message = (
            f"{source.source_name!r} is capped at {source.max_epochs:g} epochs, and the run goes "
            f"past them at step {step:,} and through {epochs:.2f} by its end: "
            + _advice(data, axis, datasets, k, allowed, end, fresh=forecast.begin == 0)
        )
        yield Cap(
            name=source.source_name,
            max_epochs=source.max_epochs,
            epochs=epochs,
            step=step,
            message=message,
        )


def _advice(
    data: DataConfig,
    axis: Axis,
    datasets: Sequence[TokenDataset],
    k: int,
    allowed: int,
    end: int,
    *,
    fresh: bool,
) -> str:
    """What to do about it, in words; a weight that is named has been tried."""
    fewer = "take fewer steps, or raise max_epochs"
    if not fresh:
        return f"give it less weight from here on, {fewer}"
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        given = _given(_scaled(data, k, middle), axis, datasets, k, end)
        low, high = (middle, high) if given is not None and given <= allowed else (low, middle)
        if low and (high - low) < low * 10**-DIGITS / 4:
            break
    chosen = _scaled(data, k, low) if low else data
    given = _given(chosen, axis, datasets, k, end) if low else None
    if given is None or given > allowed:
        return f"no weight of its own keeps it, so {fewer}"
    name, before = data.source_names[k], data.datasets[k].weight
    words = [f"weight = {chosen.datasets[k].weight:g} in place of {before:g}"]
    for old, new in zip(data.active_phases, chosen.active_phases, strict=True):
        if old.dataset_weights.get(name):
            was, now = old.dataset_weights[name], new.dataset_weights[name]
            words.append(f"{now:g} in place of {was:g} from step {old.start_step:,} on")
    return f"{' and '.join(words)} would keep it; or {fewer}"


def _given(
    data: DataConfig, axis: Axis, datasets: Sequence[TokenDataset], k: int, end: int
) -> int | None:
    """Samples that source k gives under another config; None where it cannot be one."""
    order = axis.order
    assert isinstance(order, MixtureOrder)
    if order.first is not None:  # edited: what other weights would have given is another run
        return None
    try:
        stages = stages_of(data, resolve(data), list(datasets), axis.plan.position_of)
    except ConfigError:  # a phase that would be left without any weight
        return None
    changed = MixtureOrder(axis.sizes, order.names, seed=order.seed, stages=stages)
    return int(changed.counts(end)[k])


def _scaled(data: DataConfig, k: int, factor: float) -> DataConfig:
    """The config with a source's weights made less by a factor, in few digits, rounded down."""
    name = data.source_names[k]
    datasets = list(data.datasets)
    datasets[k] = replace(datasets[k], weight=_rounded_down(datasets[k].weight * factor))

    def less(weights: dict[str, float]) -> dict[str, float]:
        weight = weights.get(name)
        return weights | ({name: _rounded_down(weight * factor)} if weight else {})

    return replace(
        data,
        datasets=datasets,
        phases=[replace(p, dataset_weights=less(p.dataset_weights)) for p in data.phases],
        anneal_weights=less(data.anneal_weights),
    )


def _rounded_down(weight: float) -> float:
    """In three digits.

    >>> _rounded_down(0.123456), _rounded_down(7.0)
    (0.123, 7.0)
    """
    if not weight:
        return weight
    unit = Decimal(1).scaleb(floor(log10(weight)) - DIGITS + 1)
    return float(Decimal(weight).quantize(unit, rounding=ROUND_DOWN))
