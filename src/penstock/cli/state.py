"""`penstock state`: what a saved state says, and a run that goes on otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from penstock.loader import StatefulDataLoader

STATE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.group(epilog="Example: penstock state show state.json")
def state() -> None:
    """Show a saved state of a loader, or edit the run in it."""


@state.command(epilog="Example: penstock state show state.json --json")
@click.argument("state", type=STATE)
@click.option("--json", "as_json", is_flag=True, help="Print all of it as JSON.")
def show(state: Path, as_json: bool) -> None:
    """Show where a state is, what its sources gave, and what was edited."""
    _print(facts_of(_read(state)), state, as_json=as_json)


@state.command(
    epilog="Example: penstock state edit state.json --back-to 40000 --skip 40100-40300 -o new.json"
)
@click.argument("state", type=STATE)
@click.option(
    "-o", "--out", required=True, type=click.Path(path_type=Path), help="The state to write."
)
@click.option("--back-to", type=int, metavar="STEP", help="Go back to this step first.")
@click.option(
    "--skip", multiple=True, metavar="STEP[-STEP]", help="Leave out these steps, the last too."
)
@click.option(
    "--weight",
    multiple=True,
    metavar="NAME=SHARE",
    help="A source's share of 1; the others keep theirs of what is left.",
)
@click.option("--add", multiple=True, metavar="NAME=SHARE", help="A new source, which --run has.")
@click.option("--remove", multiple=True, metavar="NAME", help="A source that gives no more.")
@click.option(
    "--exclude",
    multiple=True,
    metavar="[SOURCE:]DOC[-DOC]",
    help="Documents whose labels are masked from here on.",
)
@click.option("--exclude-file", type=STATE, help="The same, one a line; # begins a comment.")
@click.option(
    "--run",
    type=STATE,
    metavar="RUN.toml",
    help="The run that goes on: its sources and weights are taken over, the edit is checked.",
)
@click.option("--overwrite", is_flag=True, help="Replace what stands at --out.")
@click.option("--json", "as_json", is_flag=True, help="Print the new state's facts as JSON.")
def edit(
    state: Path,
    out: Path,
    back_to: int | None,
    skip: tuple[str, ...],
    weight: tuple[str, ...],
    add: tuple[str, ...],
    remove: tuple[str, ...],
    exclude: tuple[str, ...],
    exclude_file: Path | None,
    run: Path | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Write a state in which the run goes on otherwise.

    What was trained stays: a source goes on after its last sample, steps keep their numbers. The
    loader that loads the new state does the rest.
    """
    from penstock.errors import ConfigError
    from penstock.loader import edit_state

    if out.exists() and not overwrite:
        raise ConfigError(f"{out} exists already: write elsewhere, or pass --overwrite")
    lines = [] if exclude_file is None else exclude_file.read_text().splitlines()
    listed = [text for text in (line.split("#")[0].strip() for line in lines) if text]
    edited = edit_state(
        _read(state),
        weights=_shares(weight, "--weight"),
        add=_shares(add, "--add"),
        remove=remove,
        exclude=_documents([*exclude, *listed]),
        skip_steps=[_range(text, "--skip") for text in skip],
        back_to=back_to,
        run=None if run is None else _opened(run),
    )
    part = out.with_name(f".{out.name}.part")
    part.write_text(json.dumps(edited, indent=1) + "\n")
    part.replace(out)
    _print(facts_of(edited), out, as_json=as_json)


def facts_of(state: dict[str, Any]) -> dict[str, Any]:
    """What a state says, as numbers by name."""
    from penstock.errors import StateMismatch
    from penstock.loader.state import Documented, read_state
    from penstock.order.weights import TOTAL

    found = read_state(state)
    if isinstance(found, Documented):
        raise StateMismatch("this state has only the documented keys, and no position to show")
    begun = [stage.position for stage in found.stages if stage.position <= found.position]
    stages = [
        {
            "position": stage.position,
            "phase": stage.start_step,
            "weights": {
                name: weight / TOTAL
                for name, weight in zip(found.sources or ["data"], stage.weights, strict=True)
                if weight
            },
            "begun": stage.position <= found.position,
            "in_force": bool(begun) and stage.position == begun[-1],
        }
        for stage in found.stages
    ]
    return {
        "version": state["version"],
        "step": state.get("step"),
        "position": found.position,
        "epoch": state.get("epoch"),
        "sources": _sources(found),
        "stages": stages,
        "skipped": [list(each) for each in found.surgery.skipped],
        "excluded": {
            name: sum(each.end - each.first for each in ranges)
            for name, ranges in found.surgery.excluded.items()
        },
    }


def _sources(found: Any) -> dict[str, dict[str, Any]]:
    """How far each source of a mixture has come, and how many of its samples were left out."""
    from penstock.loader.edit import plan_of
    from penstock.order import MixtureOrder

    if not found.sources:
        return {}
    known = {**found.surgery.retired, **found.identity.get("sources", {})}
    sizes = [(known.get(name) or {}).get("samples") or 0 for name in found.sources]
    order = MixtureOrder(
        sizes,
        found.sources,
        seed=found.identity["seed"],
        shuffle=found.identity["shuffle"],
        stages=found.stages,
        first=[None] * len(sizes),
    )
    given = order.counts(found.position).tolist()
    kept = plan_of(found).kept(0, found.position) if found.surgery.skipped else []
    delivered = order.given(kept) if kept else given
    return {
        name: {
            "given": count,
            "left_out": count - there,
            "samples": size or None,
            "epochs": count / size if size else None,
            "removed": name in found.surgery.retired,
        }
        for name, count, there, size in zip(found.sources, given, delivered, sizes, strict=True)
    }


def _print(facts: dict[str, Any], path: Path, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"state": str(path), **facts}))
        return
    click.echo(
        f"{path}: step {facts['step']:,}, position {facts['position']:,}, epoch {facts['epoch']:,}"
    )
    now: dict[str, float] = next((s["weights"] for s in facts["stages"] if s["in_force"]), {})
    for name, source in facts["sources"].items():
        share = "removed" if source["removed"] else f"{now.get(name, 0.0):.1%}"
        epochs = "" if source["epochs"] is None else f"{source['epochs']:10.3f} epochs"
        click.echo(f"  {name:24} {share:>8} {source['given']:>16,} given {epochs}")
    for stage in facts["stages"]:
        if not stage["begun"]:
            shares = ", ".join(f"{name} {share:.1%}" for name, share in stage["weights"].items())
            click.echo(f"  from position {stage['position']:,} on: {shares}")
    for begin, end in facts["skipped"]:
        click.echo(f"  positions {begin:,} to {end - 1:,} are left out")
    for name, count in facts["excluded"].items():
        click.echo(f"  {count:,} documents of {name} are excluded")


def _read(path: Path) -> dict[str, Any]:
    from penstock.errors import StateMismatch

    try:
        found = json.loads(path.read_text())
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise StateMismatch(
            f"{path} holds no state: save one with json.dump(loader.state_dict(), file)"
        )
    return found


def _opened(run: Path) -> StatefulDataLoader:
    from penstock.run import load_run, open_run

    return open_run(load_run(run))


def _shares(texts: tuple[str, ...], option: str) -> dict[str, float]:
    from penstock.errors import ConfigError

    found: dict[str, float] = {}
    for text in texts:
        name, equals, number = text.rpartition("=")
        try:
            found[name] = float(number)
        except ValueError:
            equals = ""
        if not equals or not name:
            raise ConfigError(f"{option} takes NAME=SHARE, like code=0.3, not {text!r}")
    return found


def _documents(texts: list[str]) -> dict[str, list[tuple[int, int]]]:
    from penstock.dataset.excluded import ALONE

    found: dict[str, list[tuple[int, int]]] = {}
    for text in texts:
        name, _, numbers = text.rpartition(":")
        found.setdefault(name or ALONE, []).append(_range(numbers, "--exclude"))
    return found


def _range(text: str, option: str) -> tuple[int, int]:
    """A number, or the first and the last of a range.

    >>> _range("40100-40300", "--skip"), _range("7", "--skip")
    ((40100, 40300), (7, 7))
    """
    from penstock.errors import ConfigError

    first, dash, last = text.partition("-")
    try:
        return int(first), int(last if dash else first)
    except ValueError:
        raise ConfigError(
            f"{option} takes a number or a range, like 120 or 120-140, not {text!r}"
        ) from None
