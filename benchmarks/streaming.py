"""How fast text becomes batches with no store between: Penstock's streams beside what they replace.

    make bench-streaming                            # or: python benchmarks/streaming.py --quick

Four parts, over the text and the tokenizer of bench-prepare. Rows are compared before anything is
timed. CPU seconds are those of all threads and child processes.

- nanochat's best-fit rows, over a tokenizer that costs nothing, beside its algorithm told again
  plainly: real text cut at log-normal lengths, row groups of 1,024. Both in one process, by turns
  over the same rows, in windows from row 2,000 on.
- `TextStream` in closed chunks beside what the tokenizer alone does, fed the same documents in the
  same order from memory, 256 at a time, by as many threads. Each in a process of its own, over text
  that it has not seen. Counted from when all lanes are open, and no token that was not both
  delivered and tokenized in that time; with 8 lanes, and with 240 over the whole run.
- the same stream beside `datasets` streaming, a plain packing and torch's DataLoader.
- states: their bytes, and the seconds to the first batch from one deep in the corpus.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch

from plain_loaders import B, Files, Free, Peer, T, cut_documents, plain_best_fit, plain_flat
from prepare import make_data

CORES = 2
LANES = 8  # where a steady state is measured: an eighth of the text is open after the first batch
WINDOW = 200  # batches: 3,200 rows
Figures = dict[str, float]


def spent() -> tuple[float, float]:
    """Wall and CPU seconds, those of children that have ended included."""
    times = os.times()
    return time.perf_counter(), times.user + times.system + times.children_user


# --- nanochat's rows


def nanochats_rows(folder: str, kind: str, windows: int) -> dict[str, list[float]]:
    """Tokens a second of both loaders, ours and the plain one, in each window."""
    import penstock

    tokenizer, files = Free(kind), [str(path) for path in sorted(Path(folder).glob("*.parquet"))]
    figures: dict[str, list[float]] = {}
    loaders = {
        "best fit": (
            penstock.tokenizing_distributed_data_loader_with_state_bos_bestfit,
            plain_best_fit,
        ),
        "flat": (penstock.tokenizing_distributed_data_loader_with_state, plain_flat),
    }
    for name, (ours, plain) in loaders.items():
        pair = {
            "penstock": ours(tokenizer, B, T, "train", device="cpu", data_dir=folder),
            "plain": plain(tokenizer, files[:-1]),
        }
        for _ in range(2000 // B):  # the same rows, before anything is timed
            mine, theirs = (next(each) for each in pair.values())
            assert all(map(torch.equal, mine[:2], theirs[:2])), "the rows differ"
            assert mine[2].items() >= theirs[2].items(), "the places differ"
        for _ in range(windows):
            for who, batches in pair.items():
                wall, cpu = spent()
                for _ in range(WINDOW):
                    next(batches)
                now, then = spent()
                tokens = WINDOW * B * T
                figures.setdefault(f"{who}, {name}", []).append(tokens / (now - wall))
                figures.setdefault(f"{who}, {name}, CPU", []).append(tokens / (then - cpu))
    return figures


# --- real tokenizers


def open_stream(files: Files, tokenizer: Any, lanes: int, **options: Any) -> Any:
    from penstock import TextStream

    options = {"seed": 1, "threads": CORES} | options
    return TextStream(files, tokenizer, T, B, lanes=lanes, **options)


def stream(files: Files, folder: str, backend: str, lanes: int, share: float) -> Figures:
    """A stream, until so large a share of the documents have been opened."""
    from penstock.text import open_tokenizer

    source = open_stream(files, open_tokenizer(folder, backend=backend), lanes)  # type: ignore[arg-type]
    enough = share * source.corpus.documents
    first = whole = spent()
    done = taken = 0
    ledger: dict[str, int] = {"documents": 0}
    batches = 0
    while ledger["documents"] < enough:
        source.next_batch()
        batches += 1
        ledger = source.stats()["ledger"]
        if batches == -(-lanes // B):  # every lane is open
            first, done, taken = spent(), ledger["delivered"], ledger["tokens"]
    last = spent()
    source.close()
    tokens = min(ledger["delivered"] - done, ledger["tokens"] - taken)
    return {
        "steady": tokens / (last[0] - first[0]),
        "steady, CPU": tokens / (last[1] - first[1]),
        "whole": ledger["tokens"] / (last[0] - whole[0]),
        "whole, CPU": ledger["tokens"] / (last[1] - whole[1]),
        "padding": ledger["padding"] / (ledger["padding"] + ledger["delivered"]),
    }


def alone(files: Files, folder: str, backend: str, lanes: int, share: float) -> Figures:
    """The tokenizer by itself, fed the same documents in the same order, from memory."""
    from penstock.stream.corpus import open_corpus
    from penstock.stream.deal import Turns
    from penstock.stream.reading import Reader
    from penstock.text import open_tokenizer

    corpus = open_corpus(files, "text", lanes=lanes)
    deal, reader = Turns(len(corpus.units), lanes, seed=1), Reader(corpus, "text", "error")
    batches, documents, warm = [], 0, 0
    for number in range(len(corpus.units)):
        if documents >= share * (corpus.documents or 0):
            break
        for docs in reader.chunks(corpus.units[deal.unit((0, number))]):
            batches += [docs.texts[at : at + 256] for at in range(0, len(docs), 256)]
            documents += len(docs)
        if number < lanes:
            warm = len(batches)
    tokenizer = open_tokenizer(folder, backend=backend)  # type: ignore[arg-type]
    whole = spent()
    before = encode_all(tokenizer, batches[:warm])
    steady = spent()
    after = encode_all(tokenizer, batches[warm:])
    last = spent()
    return {
        "steady": after / (last[0] - steady[0]),
        "steady, CPU": after / (last[1] - steady[1]),
        "whole": (before + after) / (last[0] - whole[0]),
        "whole, CPU": (before + after) / (last[1] - whole[1]),
    }


def encode_all(tokenizer: Any, batches: list[Any]) -> int:
    """How many tokens batches have; documents' EOS are counted too, as streams do."""
    waiting = iter(batches)  # that all threads take from

    def work(_: int) -> int:
        return sum(len(tokenizer.encode(batch)[0]) + len(batch) for batch in waiting)

    with ThreadPoolExecutor(CORES) as threads:
        return sum(threads.map(work, range(CORES)))


# --- datasets and torch


def peer(files: Files, folder: str, share: float) -> Figures:
    """Tokens a second through torch's DataLoader, from its first batch on."""
    from torch.utils.data import DataLoader

    text = sum(Path(file).with_suffix(".jsonl").stat().st_size for file in files)
    batches = iter(DataLoader(Peer(files, folder), batch_size=B, num_workers=CORES))
    next(batches)
    first, tokens = spent(), 0
    while tokens < share * text / 4:  # about 4 bytes a token
        tokens += next(batches)["input_ids"].numel()
    return {"steady": tokens / (spent()[0] - first[0])}


# --- states


def states(files: Files, folder: str, backend: str, packing: str, lanes: int) -> Figures:
    """Bytes of a state, and seconds to a first batch from epoch 5 on."""
    from penstock.text import open_tokenizer

    tokenizer = open_tokenizer(folder, backend=backend)  # type: ignore[arg-type]
    with open_stream(files, tokenizer, lanes, packing=packing) as source:
        if packing == "chunked":
            state = deep(source.state_dict(), len(source.corpus.units))
        else:  # its state says what waits, which has to be lived through
            for _ in range(100):
                source.next_batch()
            state = source.state_dict()
    written = json.dumps(state, separators=(",", ":"))
    with open_stream(files, tokenizer, lanes, packing=packing) as source:
        start, _ = spent()
        source.load_state_dict(json.loads(written))
        loaded, cpu = spent()
        source.next_batch()
        first, used = spent()
    sizes = [len(json.dumps(each, separators=(",", ":"))) for each in state["lanes"].values()]
    return {
        "bytes": len(written),
        "bytes of a lane": max(sizes),
        "seconds to load": loaded - start,
        "seconds to the first batch": first - start,
        "CPU seconds": used - cpu,
    }


def deep(state: dict[str, Any], units: int) -> dict[str, Any]:
    """The state of a run that is in the middle of epoch 5, at a second row."""
    lanes = len(state["lanes"])
    middle = 5 * units + units // 2
    places = {lane: middle + (int(lane) - middle) % lanes for lane in state["lanes"]}
    addresses = {lane: [*divmod(place, units), 1] for lane, place in places.items()}
    return state | {"row": 10**7 * lanes, "step": 10**7 * lanes // B, "lanes": addresses}


# --- measuring


def apart(name: str, *arguments: Any) -> Any:
    """What a function gives in a fresh interpreter."""
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import streaming, json; "
    )
    code += f"print(json.dumps(streaming.{name}(*json.loads(sys.argv[1]))))"
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, json.dumps(arguments)],
        check=True, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    return json.loads(ran.stdout.splitlines()[-1])


def check(files: Files, folder: str) -> None:
    """Both backends and the peer make the same rows, and chunks hold what the tokenizer gives."""
    from penstock.text import open_tokenizer

    fast, slow = (open_tokenizer(folder, backend=kind) for kind in ("fast", "reference"))
    plain = {"packing": "concat", "lanes": 1, "shuffle": False}
    rows, same = (open_stream(files, each, **plain) for each in (fast, slow))  # type: ignore[arg-type]
    peers = iter(torch.utils.data.DataLoader(Peer(files, folder), batch_size=B))
    for _ in range(20):
        found, other, theirs = rows.next_batch(), same.next_batch(), next(peers)
        assert torch.equal(found["input_ids"], other["input_ids"]), "the backends differ"
        assert torch.equal(found["input_ids"], theirs["input_ids"]), "the peer's rows differ"
    texts = pq.read_table(files[0])["text"].combine_chunks()
    wanted = len(fast.encode(texts)[0]) + len(texts)
    chunked = open_stream(files[:1], fast, 1)
    while (ledger := chunked.stats()["ledger"])["documents"] < len(texts):
        chunked.next_batch()
    assert ledger["tokens"] == wanted, "chunks hold other tokens than the tokenizer gives"
    for each in (rows, same, chunked):
        each.close()


@dataclass
class Run:
    """What is measured with, and what was found."""

    root: Path
    files: Files
    few: Files  # for those that are slow
    tokenizer: str
    turns: int
    figures: Figures = field(default_factory=dict)
    asked: list[tuple[str, list[float], float]] = field(default_factory=list)

    def note(self, name: str, value: float, unit: str) -> None:
        """Print a figure, and keep it."""
        self.figures[name] = value
        print(f"{name:56} {value:12,.2f} {unit}", flush=True)

    def by_turns(
        self, name: str, contenders: dict[str, Callable[[], Figures]]
    ) -> list[list[Figures]]:
        """What contenders find, one after the other, some times; medians are noted."""
        found: list[list[Figures]] = [[] for _ in contenders]
        for _ in range(self.turns):
            for runs, contender in zip(found, contenders.values(), strict=True):
                runs.append(contender())
        for who, runs in zip(contenders, found, strict=True):
            for clock in runs[0]:
                rate = statistics.median(run[clock] for run in runs)
                if clock != "padding":
                    self.note(f"{name}: {who}, {clock}", rate / 1e6, "M tokens/s")
        return found

    def ratio(self, name: str, values: list[float], asked: float) -> None:
        """Keep what is asked for; the median of `values` counts."""
        self.asked.append((name, values, asked))


def rows_part(run: Run) -> None:
    """The rows of nanochat, over arrays and over lists."""
    folder = run.root.parent / f"documents-{run.root.name}"
    cut_documents(run.files, folder, 96)
    for kind, floor in (("arrays", 8.0), ("lists", 2.0)):
        found = apart("nanochats_rows", str(folder), kind, 2 * run.turns + 1)
        for name, clock in product(("best fit", "flat"), ("", ", CPU")):
            ours, theirs = (found[f"{who}, {name}{clock}"] for who in ("penstock", "plain"))
            for who, rates in (("penstock", ours), ("plain", theirs)):
                rate = statistics.median(rates) / 1e6
                run.note(f"{name}, {kind}: {who}{clock}", rate, "M tokens/s")
            run.ratio(
                f"{name}, {kind}: penstock / plain{clock}",
                [a / b for a, b in zip(ours, theirs, strict=True)],
                floor if name == "best fit" and not clock else 0.0,
            )


def text_part(run: Run) -> None:
    """Chunked streams beside the tokenizer alone."""
    for backend, files, floor in (("reference", run.few, 0.8), ("fast", run.files, 0.6)):
        for lanes, which in ((LANES, "steady"), (240, "whole")):
            arguments = (files, run.tokenizer, backend, lanes, 0.8)
            ours, theirs = run.by_turns(
                f"{backend}, {lanes} lanes",
                {
                    "penstock": lambda a=arguments: apart("stream", *a),  # type: ignore[misc]
                    "tokenizer alone": lambda a=arguments: apart("alone", *a),  # type: ignore[misc]
                },
            )
            for clock in ("", ", CPU"):
                run.ratio(
                    f"{backend}, {lanes} lanes, {which}: penstock / alone{clock}",
                    [
                        a[which + clock] / b[which + clock]
                        for a, b in zip(ours, theirs, strict=True)
                    ],
                    0.0 if clock else floor,
                )


def peer_part(run: Run) -> None:
    """Streams beside `datasets` and torch's DataLoader, the tokenizer the same."""
    arguments = (run.few, run.tokenizer, "reference", LANES, 0.8)
    ours, fast, theirs = run.by_turns(
        "side by side",
        {
            "penstock, reference": lambda: apart("stream", *arguments),
            "penstock, fast": lambda: apart("stream", *arguments[:2], "fast", *arguments[3:]),
            "datasets + DataLoader": lambda: apart("peer", run.few, run.tokenizer, 0.6),
        },
    )
    for name, runs in (("reference", ours), ("fast", fast)):
        values = [a["steady"] / b["steady"] for a, b in zip(runs, theirs, strict=True)]
        run.ratio(f"penstock, {name} / datasets + DataLoader", values, 0.0)


def state_part(run: Run) -> None:
    """Bytes of states, and seconds to go on from them."""
    for backend in ("fast", "reference"):
        for packing, lanes in (("chunked", 240), ("chunked", LANES), ("best_fit_crop", 1)):
            found = apart("states", run.files, run.tokenizer, backend, packing, lanes)
            name = f"state, {packing}, {lanes} lanes, {backend}"
            for what in ("seconds to load", "seconds to the first batch", "CPU seconds"):
                run.note(f"{name}: {what}", found[what], "s")
            run.note(f"{name}: size", found["bytes"] / 1024, "KiB")
            if backend == "fast" and lanes == 240:
                run.ratio("16 KiB / a state of 240 lanes", [16384 / found["bytes"]], 1.0)
            if backend == "fast" and lanes == 1:
                run.ratio("64 KiB / a lane of best fit", [65536 / found["bytes of a lane"]], 1.0)
            if lanes == 240:
                seconds = found["seconds to the first batch"]
                run.ratio(f"2 s / going on from a state, {backend}", [2 / seconds], 1.0)


PARTS = {"rows": rows_part, "text": text_part, "peer": peer_part, "state": state_part}


def main() -> None:
    """Run everything and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("build/bench-prepare"))
    parser.add_argument("--text", type=Path, action="append", default=[], help="more text, first")
    parser.add_argument("--quick", action="store_true", help="60 MB of text rather than 400")
    parser.add_argument("--turns", type=int, default=3, help="of each contender; medians count")
    parser.add_argument("--part", choices=PARTS, action="append", help="not all of them")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args()
    megabytes = 60 if options.quick else 400
    root = options.data.absolute() / f"{megabytes}{'-more' if options.text else ''}"
    make_data(root, megabytes, options.text)
    files = [str(path) for path in sorted((root / "text").glob("*.parquet"))]
    few = files[:: max(1, len(files) // 4)][:4]
    run = Run(root, files, few, str(root / "tokenizer"), options.turns)
    named = ("penstock", "gigatoken", "tokenizers", "datasets", "torch", "pyarrow")
    print(
        f"{megabytes} MB of text, B = {B}, T = {T}, {CORES} threads; "
        f"Python {platform.python_version()}, " + ", ".join(f"{n} {version(n)}" for n in named)
    )
    with tempfile.TemporaryDirectory() as cache:
        os.environ |= {"PENSTOCK_CACHE_DIR": cache, "HF_HOME": cache, "HF_HUB_OFFLINE": "1"}
        check(files, run.tokenizer)
        for name in options.part or PARTS:
            PARTS[name](run)
    print()
    for name, values, floor in run.asked:
        got = statistics.median(values)
        judged = f"asked {floor:5.2f}   {'ok' if got >= floor else 'SHORT'}" if floor else ""
        print(f"{name:56} {got:7.2f} ({min(values):.2f}–{max(values):.2f})   {judged}".rstrip())
    if options.json:
        ratios = {name: statistics.median(values) for name, values, _ in run.asked}
        options.json.write_text(json.dumps({"figures": run.figures, "ratios": ratios}, indent=1))


if __name__ == "__main__":
    main()
