"""A forecast as a picture: which source the samples come from, and how often each is gone through.

draw("plan.png", forecast, title="run.toml")
"""

from __future__ import annotations

import os

import numpy as np

from penstock.chart import Chart, save
from penstock.errors import ConfigError
from penstock.forecast.report import Forecast

SIZE = 1000, 680


def draw(path: str | os.PathLike[str], forecast: Forecast, title: str) -> None:
    """Shares stacked by step, and epochs of each source; phase switches are marked."""
    if not forecast.course:
        raise ConfigError(
            "there is no picture of a stream: it has one source, and where an epoch of it ends "
            "is not known"
        )
    charts = shares_of(forecast), epochs_of(forecast)
    for stage in forecast.stages:
        if stage.first_step > forecast.first_step:
            scale = "" if stage.lr_scale == 1 else f": lr × {stage.lr_scale:g}"
            charts[0].mark(stage.first_step, f"step {stage.first_step:,}{scale}")
            charts[1].mark(stage.first_step)
    tokens = f"{forecast.tokens:,} tokens in {forecast.steps:,} steps"
    save(path, *charts, title=f"{title}: {tokens}", size=SIZE)


def shares_of(forecast: Forecast) -> Chart:
    """Of each source its share of the samples, in one stretch of steps after the other."""
    steps: list[int] = []
    shares: list[np.ndarray[tuple[int], np.dtype[np.float64]]] = []
    for course in forecast.course:
        given = np.diff(np.array(course.given), axis=0)
        for begin, end, each in zip(course.steps, course.steps[1:], given, strict=False):
            steps += [begin, end]
            shares += [each / max(int(each.sum()), 1)] * 2
    by_source = np.array(shares).T
    names = [source.name for source in forecast.sources]
    chart = Chart("Share of samples, as they are delivered", y="share", percent=True, top=1.0)
    return chart.areas(steps, dict(zip(names, by_source, strict=True)))


def epochs_of(forecast: Forecast) -> Chart:
    """How often each source has been gone through, since the start of the run."""
    steps = [step for course in forecast.course for step in course.steps]
    given = np.array([each for course in forecast.course for each in course.given])
    chart = Chart("Epochs of each source, since the start of the run", x="step", y="epochs")
    caps = {source.source_name: source.max_epochs for source in forecast.run.data.datasets}
    for k, source in enumerate(forecast.sources):
        chart.lines({source.name: (steps, given[:, k] / max(source.samples, 1))})
        cap = caps.get(source.name)
        if cap is not None:
            chart.level(cap, f"{source.name}: at most {cap:g}", source.name)
    return chart
