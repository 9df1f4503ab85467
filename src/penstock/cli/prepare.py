"""`penstock prepare`: raw documents to a committed store."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from penstock.prepare.tally import Progress, Tally

RECIPES = ("pretrain", "chat", "instruct", "dpo", "grpo")


@click.command(epilog="Example: penstock prepare corpus/*.parquet -o tokens --tokenizer gpt2/")
@click.argument("inputs", nargs=-1, required=True, metavar="IN...")
@click.option(
    "-o", "--out", required=True, type=click.Path(path_type=Path), help="The store to write."
)
@click.option(
    "--tokenizer",
    required=True,
    help="A folder or file with tokenizer.json, a .tiktoken file, or a name on the Hub.",
)
@click.option(
    "--recipe",
    type=click.Choice(RECIPES),
    help="A built-in recipe.  [default: pretrain]",
)
@click.option(
    "-c",
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A recipe in JSON or TOML.",
)
@click.option("--workers", type=int, help="Processes; 0 for none.  [default: one a core]")
@click.option(
    "--bad",
    type=click.Choice(["error", "reject"]),
    default="error",
    show_default=True,
    help="What becomes of documents that cannot be read: stop, or write to rejects.jsonl.",
)
@click.option(
    "--max-rejects",
    type=float,
    default=0.01,
    show_default=True,
    help="Stop when more than this share of documents is rejected.",
)
@click.option(
    "--backend",
    type=click.Choice(["auto", "fast", "reference"]),
    default="auto",
    show_default=True,
    help="Which tokenizer implementation; auto is the fast one where its ids are the same.",
)
@click.option("--trust-pickle", is_flag=True, help="Open a pickled tiktoken encoding.")
@click.option("--overwrite", is_flag=True, help="Start anew, whatever is there.")
@click.option("--json", "as_json", is_flag=True, help="Print the ledger as JSON.")
def prepare(
    inputs: tuple[str, ...],
    out: Path,
    tokenizer: str,
    recipe: str | None,
    config: Path | None,
    workers: int | None,
    bad: str,
    max_rejects: float,
    backend: str,
    trust_pickle: bool,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Tokenize documents into a store, by a recipe.

    Inputs are Parquet, JSONL or JSON files, plain or compressed, folders of them, globs or URLs. A
    run that is killed goes on where it was when the same command is given again; the store is the
    same, byte for byte, for any number of workers.
    """
    from penstock.cli.progress import Bar, note
    from penstock.errors import ConfigError
    from penstock.prepare import Pipeline, PipelineConfig
    from penstock.prepare import recipe as built_in

    if recipe and config:
        raise ConfigError("give a --recipe or a --config, not both")
    name: Any = recipe or "pretrain"
    chosen = PipelineConfig.from_file(config) if config else built_in(name)
    policy: Any = bad
    pipeline = Pipeline(
        chosen,
        inputs,
        out,
        tokenizer,
        workers=workers,
        policy=policy,
        max_rejects=max_rejects,
        backend=backend,
        trust_pickle=trust_pickle,
        overwrite=overwrite,
    )

    def show(at: Progress) -> None:
        bar.show(at.bytes, at.total, f"{at.tally.tokens:,} tokens, {at.tally.rejects:,} rejects")

    with Bar("Preparing") as bar, warnings.catch_warnings():
        warnings.showwarning = note
        tally = pipeline.run(show)
    if as_json:
        click.echo(json.dumps(tally.to_dict()))
    else:
        for line in summary(tally):
            click.echo(line)
        click.echo(f"{out} is complete: look at it with `penstock inspect {out}`")


def summary(tally: Tally) -> list[str]:
    """A ledger in words."""
    lines = [
        (
            f"{tally.documents:,} documents in, {tally.kept:,} kept, "
            f"{tally.tokens:,} tokens in {tally.records:,} records"
        )
    ]
    if tally.truncated_tokens:
        share = tally.truncated_tokens / max(tally.tokens_in, 1)
        lines.append(
            f"truncated: {tally.truncated_tokens:,} tokens ({share:.1%}) of "
            f"{tally.truncated_documents:,} documents"
        )
    lines += [f"filtered by {rule}: {count:,}" for rule, count in sorted(tally.filtered.items())]
    lines += [f"rejected, {why}: {count:,}" for why, count in sorted(tally.rejected.items())]
    if tally.rows:
        lines.append(f"packed into {tally.rows:,} rows, {tally.padding:,} cells of them padding")
    return lines
