"""What `penstock plan` prints: tables on a terminal, the same in plain columns elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from penstock.forecast import Difference, Forecast
    from penstock.forecast.makeup import Labels
    from penstock.forecast.report import Amount

REPEATS = 3  # steps at which a source begins to repeat that are shown


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text; columns named in `left` begin at their left."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: Sequence[str] = ()


def show(parts: Iterator[str | Table]) -> None:
    """Print lines and tables."""
    from rich import box
    from rich.console import Console
    from rich.table import Table as Drawn

    console = Console()
    for part in parts:
        if isinstance(part, str):
            click.echo(part)
        elif not console.is_terminal:
            click.echo("\n".join(["", f"{part.title}:", *in_columns(part)]))
        else:
            drawn = Drawn(
                title=part.title, title_justify="left", title_style="bold", box=box.SIMPLE
            )
            for column in part.columns:
                side = "left" if column in part.left else "right"
                drawn.add_column(column, justify=side)  # type: ignore[arg-type] # one of its words
            for row in part.rows:
                drawn.add_row(*row)
            console.print(drawn)


def in_columns(table: Table) -> Iterator[str]:
    """A table as lines.

    >>> list(in_columns(Table("", ["a", "of"], [["x", "12"], ["yy", "3"]], left=["a"])))
    ['a   of', 'x   12', 'yy   3']
    """
    rows = [table.columns, *table.rows]
    widths = [max(len(row[k]) for row in rows) for k in range(len(table.columns))]
    for row in rows:
        cells = [
            cell.ljust(width) if name in table.left else cell.rjust(width)
            for cell, width, name in zip(row, widths, table.columns, strict=True)
        ]
        yield "  ".join(cells).rstrip()


# --- one run


def described(name: str, found: Forecast) -> Iterator[str | Table]:
    """A forecast in words and tables."""
    yield from _head(name, found)
    if found.total and not found.stream:
        yield Table(
            "stages",
            ["steps", "lr", "source", "planned", "share", "samples", "tokens", "trained", "epochs"],
            [
                [
                    f"{stage.first_step:,}–{(stage.end_step or 1) - 1:,}" if not k else "",
                    f"× {stage.lr_scale:g}" if not k else "",
                    amount.name,
                    f"{amount.planned or 0:.3%}",
                    f"{amount.share:.3%}",
                    *_counts(amount),
                ]
                for stage in found.stages
                for k, amount in enumerate(stage.sources)
            ],
            left=["steps", "lr", "source"],
        )
    if found.sources:
        yield _sources(found)
        yield _labels(found)
    yield ""
    yield from _prepared(found)
    yield from _needs(found)


def _head(name: str, found: Forecast) -> Iterator[str]:
    if found.last_step is None:
        yield f"{name}: without an end: name --steps to plan what they deliver"
    else:
        why = " (one epoch: no steps are named)" if found.until == "epoch" else ""
        yield (
            f"{name}: steps {found.first_step:,} to {found.last_step - 1:,}{why}, "
            f"{found.samples:,} samples, {found.tokens:,} tokens"
        )
        if not found.stream:
            yield f"labels: {words_of(found.labels)}"
    if found.step_time is not None and found.steps is not None:
        yield f"time: {_time(found.steps * found.step_time)} at {found.step_time:g} s a step"
    for entry in found.schedule:
        more = f" × {entry.accumulation}" if entry.accumulation > 1 else ""
        yield (
            f"from step {entry.step:,}: {entry.global_batch:,} samples a global batch{more}, "
            f"{entry.tokens_a_step:,} tokens a step"
        )
    if found.epoch_steps is not None:
        tail = (
            f"; samples dropped at its end: {found.tail_an_epoch:,}" if found.tail_an_epoch else ""
        )
        about = "about " if found.stream else ""
        yield f"an epoch of the whole: {about}{found.epoch_steps:,.6g} steps{tail}"
    if found.dropped:
        yield f"samples dropped at the ends of epochs, in all: {found.dropped:,}"
    for step in found.unreached:
        yield f"the phase of step {step:,} is not reached"
    if found.stream:
        yield from _stream(found)


def _stream(found: Forecast) -> Iterator[str]:
    stream = found.stream
    assert stream is not None
    documents = "" if stream.documents is None else f", {stream.documents:,} documents"
    yield (
        f"stream of {stream.dataset}: {stream.files:,} files{documents}, about "
        f"{_bytes(stream.text_bytes)} of text, in {stream.units:,} units for {stream.lanes:,} lanes"
    )
    if stream.tokens is not None:
        yield f"an epoch: {stream.tokens:,} tokens"
    yield f"an epoch's steps: {stream.note}"
    for stage in found.stages[1:]:
        yield f"from step {stage.first_step:,}: lr × {stage.lr_scale:g}"


def words_of(labels: Labels) -> str:
    """What becomes of labels, in words."""
    total = max(labels.total, 1)
    about = "" if labels.exact else "~"
    words = [f"{about}{labels.trained:,} trained ({labels.trained / total:.2%})"]
    for count, what in (
        (labels.masked, "masked"),
        (labels.crossing, "across documents"),
        (labels.padding, "padding"),
    ):
        if count:
            words.append(f"{about}{count:,} {what} ({count / total:.2%})")
    return ", ".join(words) + ("" if labels.exact else f"; ~ {labels.how}: --count counts them")


def _counts(amount: Amount) -> list[str]:
    about = "" if amount.labels.exact else "~"
    return [
        f"{amount.samples:,}",
        f"{amount.tokens:,}",
        f"{about}{amount.labels.trained:,}",
        f"{amount.epochs:.3f}",
    ]


def _sources(found: Forecast) -> Table:
    rows = []
    for source, amount in zip(found.sources, found.total, strict=True):
        steps = [f"{step:,}" for step in source.repeats_at[:REPEATS]]
        more = source.repeats - len(steps)
        rows.append(
            [
                source.name,
                f"{source.samples:,}",
                f"{amount.share:.3%}",
                *_counts(amount)[:3],
                f"{source.epochs_after:.3f}",
                f"{source.seen:,} ×",
                ", ".join(steps) + (f" and {more:,} more" if more else "") if steps else "never",
            ]
        )
    columns = ["source", "an epoch", "share", "samples", "tokens", "trained", "epochs by the end"]
    columns += ["seen at most", "repeats from step"]
    return Table("sources", columns, rows, left=["source", "repeats from step"])


def _labels(found: Forecast) -> Table:
    """Where labels go, and what of a source's tokens no sample has."""
    rows = []
    for source, amount in zip(found.sources, found.total, strict=True):
        labels, about = amount.labels, "" if amount.labels.exact else "~"
        parts = (labels.trained, labels.masked, labels.crossing, labels.padding)
        shares = [f"{about}{part / max(labels.total, 1):.2%}" for part in parts]
        tokens = max(source.tokens, 1)
        left_out = [f"{part:,} ({part / tokens:.2%})" for part in (source.cropped, source.unused)]
        rows.append([source.name, *shares, *left_out])
    columns = ["source", "trained", "masked", "across documents", "padding"]
    columns += ["tokens cropped", "left at ends"]
    return Table("labels, and tokens that no sample has", columns, rows, left=["source"])


def _prepared(found: Forecast) -> Iterator[str]:
    """What the runs that prepared the sources left out, where they left out anything."""
    for source in found.sources:
        ledger = source.ledger
        gone = [
            (sum((ledger.get("filtered") or {}).values()), "documents filtered"),
            (sum((ledger.get("rejected") or {}).values()), "rejected"),
            (ledger.get("truncated_tokens", 0), "tokens truncated"),
        ]
        words = [f"{count:,} {what}" for count, what in gone if count]
        if words:
            yield f"when {source.name} was prepared: {', '.join(words)}"


def _needs(found: Forecast) -> Iterator[str]:
    disk, memory, reading = found.disk, found.memory, found.reading
    plans = f", packing plans {_bytes(disk.plans)}" if disk.plans else ""
    yield f"disk: stores {_bytes(disk.stores)}{plans}"
    yield (
        f"memory of a rank: a batch {_bytes(memory.batch)}, gathered at once "
        f"{_bytes(memory.group)}, asked for ahead up to {_bytes(memory.ahead)}; mapped, shared by "
        f"a machine's ranks: {_bytes(memory.mapped)}"
    )
    if reading is not None:
        yield (
            f"read in a step: {_bytes(reading.step)} by all ranks, {_bytes(reading.rank)} by each; "
            f"up to {_bytes(reading.pages)} in whole pages"
        )
        if reading.rate is not None and reading.pages_rate is not None:
            yield (
                f"read rate: {_bytes(reading.rate)}/s, up to {_bytes(reading.pages_rate)}/s from a "
                f"cold disk; {reading.tokens_rate or 0:,.0f} tokens/s"
            )


def _bytes(count: float) -> str:
    """
    A size in a few digits.

    >>> _bytes(999), _bytes(2_500_000)
    ('999 B', '2.5 MB')
    """
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000:
            return f"{count:.3g} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1000
    return f"{count:,.3g} PB"


def _time(seconds: float) -> str:
    """
    A time in a few digits.

    >>> _time(90), _time(200_000)
    ('90 s', '2.31 days')
    """
    for size, unit in ((86_400, "days"), (3600, "hours"), (120, "minutes")):
        if seconds >= size:
            return f"{seconds / (60 if unit == 'minutes' else size):.3g} {unit}"
    return f"{seconds:.3g} s"


# --- two runs


def changed(
    name: str, found: Forecast, other_name: str, other: Forecast, changes: Difference
) -> Iterator[str | Table]:
    """What changes from one run to another."""
    if changes.step is None:
        yield f"{name} → {other_name}: {changes.why}"
    else:
        yield f"{name} → {other_name}: the first batch that differs is of step {changes.step:,}"
        yield f"  {changes.why}"
    if changes.changes:
        rows = [[f"{c.step:,}", c.what, c.before, c.after] for c in changes.changes]
        columns = ["from step", "what", name, other_name if other_name != name else "other"]
        yield Table("changes", columns, rows, left=columns[1:])
    yield Table("in all", ["", name, "other", "difference"], list(_totals(found, other)), left=[""])


def _totals(found: Forecast, other: Forecast) -> Iterator[list[str]]:
    yield _row("steps", found.steps or 0, other.steps or 0)
    yield _row("tokens", found.tokens, other.tokens)
    yield _row("trained labels", found.labels.trained, other.labels.trained)
    here = {amount.name: amount for amount in found.total}
    there = {amount.name: amount for amount in other.total}
    for name in dict.fromkeys([*here, *there]):
        counts = [side[name].samples if name in side else 0 for side in (here, there)]
        yield _row(f"samples of {name}", *counts)
        epochs = [side[name].epochs if name in side else 0.0 for side in (here, there)]
        change = epochs[1] - epochs[0]
        yield [
            f"epochs of {name}",
            *(f"{e:.3f}" for e in epochs),
            f"{change:+.3f}" if change else "=",
        ]


def _row(what: str, before: int, after: int) -> list[str]:
    change = f"{after - before:+,}" if after != before else "="
    return [what, f"{before:,}", f"{after:,}", change]
