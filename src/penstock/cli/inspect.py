"""`penstock inspect`: what a store holds, and what its documents look like."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from penstock.store import Store

BAR = 40  # characters of the longest bar


@click.command(epilog="Example: penstock inspect tokens/ --samples 3 --tokenizer gpt2/")
@click.argument("store", type=click.Path(exists=True, path_type=Path))
@click.option("--samples", type=int, default=2, show_default=True, help="Documents to show.")
@click.option("--tokenizer", help="Show documents as text; without it, as ids.")
@click.option("--trust-pickle", is_flag=True, help="Open a pickled tiktoken encoding.")
@click.option("--json", "as_json", is_flag=True, help="Print all of it as JSON.")
def inspect(
    store: Path, samples: int, tokenizer: str | None, trust_pickle: bool, as_json: bool
) -> None:
    """Show a store's counts, lengths, ledger and some of its documents.

    Text that is trained on stands as it is; masked text is dimmed, in [[double brackets]].
    """
    from penstock.store import open_store

    opened = open_store(store)
    facts = facts_of(opened)
    shown = [each for i in _chosen(opened, samples) for each in _document(opened, i)]
    if tokenizer is not None:
        from penstock.text.tokenizer import open_tokenizer

        decode = open_tokenizer(tokenizer, backend="reference", trust_pickle=trust_pickle).decode
        for each in shown:
            each["text"] = marked(each["tokens"], each["trained"], decode)
    if as_json:
        click.echo(json.dumps({**facts, "samples": shown}))
        return
    _print_facts(store, facts)
    for each in shown:
        click.echo(f"\n--- {each['key']} of document {each['document']:,}{_source(each)}")
        text = each.get("text") or marked(each["tokens"], each["trained"], _ids)
        click.echo(_dimmed(text))


def facts_of(store: Store) -> dict[str, Any]:
    """Counts, keys, lengths and what the manifest says."""
    from penstock.pack.rows import histogram

    metadata = dict(store.metadata)
    facts: dict[str, Any] = {
        "tokens": len(store),
        "documents": store.documents,
        "shards": len(store.bounds(store.keys[0])) - 1 if store.keys else 0,
        "keys": {key: [str(store.dtype(key)), store.total(key)] for key in store.keys},
        "ledger": metadata.pop("ledger", {}),
        "metadata": metadata,
    }
    if store.documents:
        counts = list(histogram(store.record_lengths()))
        while counts and not counts[-1]:
            counts.pop()
        facts["lengths"] = counts
    return facts


def _chosen(store: Store, count: int) -> list[int]:
    """Documents from all over the store, the first among them."""
    if not store.documents or count < 1:
        return []
    step = max(store.documents // count, 1)
    return list(range(0, store.documents, step))[:count]


def _document(store: Store, index: int) -> list[dict[str, Any]]:
    """Every sequence of a record: its tokens, and which of them are trained (None: all)."""
    from penstock.store import source_of

    source = None if store.path is None else source_of(store.path, index)
    shown = []
    for key in store.keys:
        if store.is_mask(key) or key == "position_ids" or store.dtype(key).kind == "f":
            continue
        if not store.documents_of(key):
            continue
        mask = {"sequence": "loss_mask", "responses": "masks"}.get(key, f"{key}_mask")
        found = store.record(index, key)
        nested = isinstance(found, list)
        masks: Any = store.record(index, mask) if mask in store.keys else None
        if masks is None:  # a store with masks trains what they mask, and nothing else
            trains = not any(map(store.is_mask, store.keys))
            masks = [[trains] * len(each) for each in (found if nested else [found])]
            masks = masks if nested else masks[0]
        for tokens, trained in zip(found, masks, strict=True) if nested else [(found, masks)]:
            entry = {"document": index, "key": key, "source": source}
            entry["tokens"] = [int(token) for token in tokens]
            entry["trained"] = [bool(each) for each in trained]
            shown.append(entry)
    return shown


def marked(tokens: list[int], trained: list[bool], decode: Any) -> str:
    """Tokens as text, runs that are masked in double brackets.

    >>> marked([1, 2, 3], [False, True, True], lambda ids: "".join("?abc"[i] for i in ids))
    '[[a]]bc'
    """
    parts, begin = [], 0
    for at in range(1, len(tokens) + 1):
        if at == len(tokens) or trained[at] != trained[begin]:
            text = decode(tokens[begin:at])
            parts.append(text if trained[begin] else f"[[{text}]]")
            begin = at
    return "".join(map(str, parts))


def _ids(tokens: list[int]) -> str:
    return " ".join(map(str, tokens)) + " "


def _dimmed(text: str) -> str:
    """Masked runs dimmed, where that can be seen; control characters made harmless."""
    safe = "".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in text)
    return safe.replace("[[", click.style("[[", dim=True, reset=False)).replace(
        "]]", "]]" + click.style("", reset=True)
    )


def _source(document: dict[str, Any]) -> str:
    found = document["source"]
    return "" if found is None else f" ({found['file']} at {found['address']:,})"


def _print_facts(path: Path, facts: dict[str, Any]) -> None:
    click.echo(
        f"{path}: {facts['documents']:,} documents, {facts['tokens']:,} tokens, "
        f"{facts['shards']:,} shards"
    )
    for key, (dtype, total) in facts["keys"].items():
        click.echo(f"  {key:14} {dtype:8} {total:>16,}")
    for name in ("tokenizer_name", "vocab_size", "eos_token_id"):
        if name in facts["metadata"]:
            click.echo(f"  {name:14} {facts['metadata'][name]}")
    if facts.get("lengths"):
        click.echo("\nlengths, in tokens")
        most = max(facts["lengths"])
        for bucket, count in enumerate(facts["lengths"]):
            bar = "█" * max(round(BAR * count / most), int(count > 0))
            click.echo(f"  {1 << bucket:>9,} to {(2 << bucket) - 1:<10,} {count:>12,} {bar}")
    if facts["ledger"]:
        from penstock.cli.prepare import summary
        from penstock.prepare.tally import Tally

        click.echo()
        known = Tally.__dataclass_fields__
        if set(facts["ledger"]) <= set(known):
            for line in summary(Tally(**facts["ledger"])):
                click.echo(line)
        else:
            click.echo(json.dumps(facts["ledger"]))
