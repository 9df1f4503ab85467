"""`penstock plan`: what a run will deliver and need, before any of it happens."""

from __future__ import annotations

import json
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.forecast import Difference, Forecast
    from penstock.run import RunConfig

COUNT = click.IntRange(min=1)


def _sizes(_ctx: click.Context, _option: click.Parameter, value: str | None) -> Any:
    """`8`, or `0:8,1000:16`: 16 from step 1,000 on."""
    try:
        if value is None or ":" not in value:
            return None if value is None else int(value)
        return [[int(number) for number in each.split(":", 1)] for each in value.split(",")]
    except ValueError:
        raise click.BadParameter(
            f"{value!r} is neither a size nor a schedule like 0:8,1000:16"
        ) from None


@click.command(epilog="Example: penstock plan run.toml --steps 100000 --step-time 0.4")
@click.argument("run", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--steps", type=COUNT, help="Steps of the run.  [default: [run], else one epoch]")
@click.option("--step-time", type=float, metavar="SECONDS", help="How long a step takes.")
@click.option(
    "--batch-size", callback=_sizes, metavar="SIZES", help="A rank's, or a schedule: 0:8,1000:16."
)
@click.option("--seq-len", type=COUNT, help="Tokens of a sample's inputs.")
@click.option("--seed", type=int, help="The order's seed.")
@click.option("--world-size", type=COUNT, help="Ranks.")
@click.option("--accumulation", type=COUNT, help="Batches a step, on every rank.")
@click.option(
    "--from-state",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Plan what is left after a saved state, in JSON.",
)
@click.option(
    "--diff",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="OTHER",
    help="Show what changes with another run, and from which step on.",
)
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Draw shares by step and epochs of each source, to .png or .svg.",
)
@click.option("--count", is_flag=True, help="Look at all data: labels are then no estimates.")
@click.option("--json", "as_json", is_flag=True, help="Print all of it as JSON.")
@click.pass_context
def plan(
    ctx: click.Context,
    /,
    run: Path,
    step_time: float | None,
    from_state: Path | None,
    diff: Path | None,
    plot: Path | None,
    count: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Show what a run will deliver and need.

    Stage by stage and source by source. RUN is a TOML file with a [data] table and, unless the
    options say it all, a [run] table. Samples, tokens, steps and epochs are exact: they are what
    loaders deliver. Labels are, unless they are marked with a tilde. Exit code 0; 1 if a source is
    gone through more often than its max_epochs allows and on_max_epochs is "error"; 2 where nothing
    can be planned.
    """
    from penstock.forecast import difference, draw, forecast_run
    from penstock.run import load_run

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = _Notes().show
        config = load_run(run, **options)
        state = None if from_state is None else _state(from_state)
        with _Bar() as bar:
            found = forecast_run(
                config, state=state, step_time=step_time, count=count, progress=bar.show
            )
            other = changes = None
            if diff is not None:
                theirs = load_run(diff, **options)
                other = forecast_run(
                    theirs, state=state, step_time=step_time, count=count, progress=bar.show
                )
                changes = difference(config, theirs, state)
        if plot is not None:
            draw(plot, found, run.name)
    if as_json:
        click.echo(json.dumps(_plain(found, other, changes)))
    else:
        _print(run, found, diff, other, changes)
        if plot is not None:
            click.echo(f"\ndrawn to {plot}")
    ctx.exit(_complaints(config, found))


class _Notes:
    """Warnings as lines, each once: both runs of a comparison may have the same data."""

    def __init__(self) -> None:
        self._shown: set[str] = set()

    def show(self, message: Warning | str, *_: Any, **__: Any) -> None:
        if str(message) not in self._shown:
            self._shown.add(str(message))
            click.echo(f"Note: {message}", err=True)


def _state(path: Path) -> dict[str, Any]:
    from penstock.errors import StateMismatch

    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise StateMismatch(
            f"{path} is not JSON ({error}): save loader.state_dict() there"
        ) from None
    if not isinstance(found, dict):
        raise StateMismatch(f"{path} is no state: it holds {type(found).__name__}, not a table")
    return found


def _plain(found: Forecast, other: Forecast | None, changes: Difference | None) -> dict[str, Any]:
    plain = found.to_dict()
    if other is not None and changes is not None:
        plain["diff"] = {**asdict(changes), "other": other.to_dict()}
    return plain


def _print(
    run: Path,
    found: Forecast,
    diff: Path | None,
    other: Forecast | None,
    changes: Difference | None,
) -> None:
    from penstock.cli.tables import changed, described, show

    if diff is not None and other is not None and changes is not None:
        show(changed(run.name, found, diff.name, other, changes))
    else:
        show(described(run.name, found))


def _complaints(config: RunConfig, found: Forecast) -> int:
    """Say which caps are passed; the exit code."""
    failed = config.data.on_max_epochs == "error"
    for cap in found.caps:
        click.echo(f"{'Error' if failed else 'Warning'}: {cap.message}", err=True)
    return int(failed and bool(found.caps))


class _Bar:
    """A progress bar for a source that is looked at; silence where that is quick, or elsewhere."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import Progress

        console = Console(stderr=True)
        self._bar = Progress(console=console, transient=True, disable=not console.is_terminal)
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> _Bar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    @property
    def show(self) -> Callable[[str, int, int], None]:
        """What is told of samples that have been looked at."""

        def told(name: str, done: int, of: int) -> None:
            if name not in self._tasks:
                self._tasks[name] = self._bar.add_task(f"Looking at {name}", total=of)
            self._bar.advance(self._tasks[name], done)

        return told
