"""`penstock verify`: whether a store still holds what was written into it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click


@click.command(epilog="Example: penstock verify tokens/ --json")
@click.argument("store", type=click.Path(exists=True, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.pass_context
def verify(ctx: click.Context, store: Path, as_json: bool) -> None:
    """Compare every byte of a store with its checksums.

    Names each file that is damaged, cut short or missing. Exit code 0 when the store is sound, 1
    when it is not.
    """
    from rich.console import Console
    from rich.progress import Progress

    from penstock.store import verify as verify_store

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("Reading shards", total=None)
        report = verify_store(
            store, progress=lambda done, shards: progress.update(task, completed=done, total=shards)
        )
    if as_json:
        click.echo(json.dumps({"store": str(store), **asdict(report)}))
    else:
        verdict = "sound" if report.ok else _count(len(report.problems), "problem")
        click.echo(
            f"{store}: {_count(report.shards, 'shard')}, {_count(report.documents, 'document')}, "
            f"{_count(report.tokens, 'token')}: {verdict}"
        )
        for line in [*report.problems, *report.notes]:
            click.echo(f"  {line}")
    if not report.ok:
        ctx.exit(1)


def _count(n: int, noun: str) -> str:
    """`3 shards`, `1 shard`."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"
