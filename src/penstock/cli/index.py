"""`penstock index`: what an epoch of a stream holds, counted once."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from penstock.stream import Counts, TextStream
    from penstock.stream.index import Progress

COUNT = click.IntRange(min=1)


@click.command(
    epilog="Example: penstock index corpus/ --tokenizer gpt2/ --seq-len 2048 --batch-size 16"
)
@click.argument("inputs", nargs=-1, required=True, metavar="IN...")
@click.option(
    "--tokenizer",
    required=True,
    help="A folder or file with tokenizer.json, a .tiktoken file, or a name on the Hub.",
)
@click.option("--seq-len", required=True, type=COUNT, help="Tokens of a row's inputs.")
@click.option(
    "--packing",
    type=click.Choice(["chunked", "concat", "best_fit_crop"]),
    default="chunked",
    show_default=True,
    help="How the stream makes rows; best_fit_crop's cannot be counted ahead, its tokens can.",
)
@click.option("--lanes", type=COUNT, default=240, show_default=True, help="The stream's lanes.")
@click.option("--text-field", default="text", show_default=True, help="The field that is read.")
@click.option("--bos/--no-bos", default=None, help="Whether documents begin with BOS.")
@click.option("--eos/--no-eos", default=None, help="Whether they end with EOS.")
@click.option(
    "--policy",
    type=click.Choice(["error", "reject"]),
    default="error",
    show_default=True,
    help="What becomes of documents that cannot be read: stop, or leave out and count.",
)
@click.option("--threads", type=COUNT, help="Units counted at a time.  [default: one a core]")
@click.option("--batch-size", type=COUNT, help="Rows a rank and step, to say the steps an epoch.")
@click.option("--world-size", type=COUNT, default=1, show_default=True, help="Ranks of that run.")
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path),
    help="The index to write or go on with.  [default: in the cache directory]",
)
@click.option("--trust-pickle", is_flag=True, help="Open a pickled tiktoken encoding.")
@click.option("--json", "as_json", is_flag=True, help="Print what was counted as JSON.")
def index(
    inputs: tuple[str, ...],
    tokenizer: str,
    seq_len: int,
    packing: Any,
    lanes: int,
    text_field: str,
    bos: bool | None,
    eos: bool | None,
    policy: Any,
    threads: int | None,
    batch_size: int | None,
    world_size: int,
    out: Path | None,
    trust_pickle: bool,
    as_json: bool,
) -> None:
    """Count a stream's documents, tokens and rows, for a finite epoch.

    Give the stream's own settings: TextStream(..., steps="epoch") then finds the counts by
    itself. A run that is killed goes on where it was when the same command is given again, and a
    second run reads nothing.
    """
    from penstock.cli.progress import Bar, note
    from penstock.stream import TextStream, count
    from penstock.stream.index import kept
    from penstock.text.tokenizer import open_tokenizer

    with warnings.catch_warnings():
        warnings.showwarning = note
        opened = open_tokenizer(tokenizer, trust_pickle=trust_pickle)
    stream = TextStream(
        inputs,
        opened,
        seq_len,
        batch_size or 1,
        text_field=text_field,
        packing=packing,
        lanes=lanes,
        bos=bos,
        eos=eos,
        policy=policy,
        threads=threads,
        rank=0,
        world_size=world_size,
    )

    def show(at: Progress) -> None:
        bar.show(at.bytes, at.total, f"{at.tokens:,} tokens")

    try:
        with Bar("Counting") as bar:
            counts = count(stream, out, show)
    except KeyboardInterrupt:
        path, units = kept(stream, out)
        click.echo(
            f"Stopped: {units:,} of {len(stream.corpus.units):,} units are counted and kept in "
            f"{path}; the same command counts the rest",
            err=True,
        )
        raise
    facts = facts_of(stream, counts, batch_size and batch_size * world_size)
    if as_json:
        click.echo(json.dumps(facts))
    else:
        for line in summary(stream.corpus.name, facts):
            click.echo(line)


def facts_of(stream: TextStream, counts: Counts, global_batch: int | None) -> dict[str, Any]:
    """What was counted, and what follows from it."""
    from penstock.stream.index import PADDED, advised_lanes

    much = counts.padding_share > PADDED
    steps = None
    if global_batch and counts.rows is not None:
        steps = counts.rows // global_batch
    return {
        "index": str(counts.path),
        "files": len(stream.corpus.files),
        "units": len(counts.units),
        "lanes": stream.share.lanes,
        "documents": counts.documents,
        "empty_documents": counts.empty,
        "tokens": counts.tokens,
        "mean_tokens": counts.tokens / max(counts.documents, 1),
        "longest_tokens": counts.longest,
        "packing": counts.packing,
        "row_tokens": counts.width,
        "rows": counts.rows,
        "padding": counts.padding,
        "padding_share": counts.padding_share,
        "advised_lanes": advised_lanes(stream, counts, stream.world_size) if much else None,
        "world_size": stream.world_size,
        "global_batch": global_batch,
        "steps": steps,
        "rejected": counts.rejected,
    }


def summary(name: str, facts: dict[str, Any]) -> Iterator[str]:
    """The same in words."""
    empty = f" ({facts['empty_documents']:,} empty)" if facts["empty_documents"] else ""
    yield f"{name}: {_some(facts['files'], 'file')}, {_some(facts['units'], 'unit')}"
    yield (
        f"{_some(facts['documents'], 'document')}{empty}, {_some(facts['tokens'], 'token')}: "
        f"{facts['mean_tokens']:,.1f} a document, {facts['longest_tokens']:,} the longest"
    )
    if facts["rows"] is None:
        yield (
            "rows an epoch: not known ahead, since best_fit_crop crops documents as they come: "
            "give streams a number of steps"
        )
    else:
        yield (
            f"rows an epoch: {facts['rows']:,} of {facts['row_tokens']:,} tokens, "
            f"{facts['padding_share']:.1%} of them padding; "
            f"{facts['rows'] / facts['units']:,.1f} a unit"
        )
        yield from _advice(facts)
        yield from _steps(facts)
    for file, count in facts["rejected"].items():
        yield f"rejected: {count:,} of {file}"
    yield f"The index is {facts['index']}"


def _advice(facts: dict[str, Any]) -> Iterator[str]:
    """What to do about much padding."""
    from penstock.stream.index import PADDED

    if facts["padding_share"] <= PADDED:
        return
    ranks = f", a multiple of {facts['world_size']}" if facts["world_size"] > 1 else ""
    if facts["advised_lanes"]:
        yield (
            f"Note: units of so few rows cost padding; about {facts['advised_lanes']:,} lanes are "
            f"the most that keep it within {PADDED:.0%} (--lanes {facts['advised_lanes']}{ranks})"
        )
    else:
        yield (
            f"Note: no number of lanes{ranks} brings padding within {PADDED:.0%} here: documents "
            "of these lengths, or so few of them, do not fill rows; --packing concat has none"
        )


def _steps(facts: dict[str, Any]) -> Iterator[str]:
    if not facts["global_batch"]:
        return
    ranks = _some(facts["world_size"], "rank")
    took = f"{_some(facts['global_batch'], 'row')} each, on {ranks}"
    if facts["steps"]:
        yield f"steps an epoch: {facts['steps']:,} of {took}"
    else:
        yield f"steps an epoch: none of {took}: there are too few rows"


def _some(count: int, word: str) -> str:
    """A count of things.

    >>> _some(1, "file"), _some(1200, "unit")
    ('1 file', '1,200 units')
    """
    return f"{count:,} {word}{'' if count == 1 else 's'}"
