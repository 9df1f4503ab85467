"""How fast documents become a store: Penstock beside datatrove and beside the tokenizer alone.

    make bench-prepare                              # or: python benchmarks/prepare.py --quick

Real text: the standard library's and the installed packages' own sources, cut into documents, so
that every machine has some; with --text DIR that of a folder of documents before it, which is less
repetitive and so slower to tokenize, for everybody. A byte-level BPE with GPT-2's regex is trained
on some of the standard library's.
Every contender runs in processes of its own, over text that it has not seen, with a tokenizer
freshly opened: warm caches read three times too fast. Both cores. Ids are compared first.
"""

from __future__ import annotations

import argparse
import gzip
import html
import json
import multiprocessing
import platform
import re
import shutil
import site
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

CORES = 2


# --- data


def sources(folders: list[Path]) -> Iterator[str]:
    """Texts of the folders given, then of this Python and its packages, in a fixed order."""
    kinds = {".py", ".pyi", ".md", ".txt", ".rst", ".h", ".c", ".js", ".json", ".html", ".csv"}
    for root in [
        *folders,
        Path(sysconfig.get_paths()["stdlib"]),
        *map(Path, site.getsitepackages()),
    ]:
        for path in sorted(root.rglob("*")):
            kind = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
            if kind in kinds and path.is_file():
                raw = path.read_bytes()
                raw = gzip.decompress(raw) if path.suffix == ".gz" else raw
                text = raw.decode("utf-8", "ignore")
                if kind == ".html":  # its markup would be most of it, and always the same
                    text = html.unescape(re.sub(r"(?s)<(script|style).*?</\1>|<[^>]*>", "", text))
                    text = re.sub(r"\s*\n\s*\n\s*", "\n\n", text)
                parts = (text[at : at + 20_000] for at in range(0, len(text), 20_000))
                yield from (part for part in parts if len(part.strip()) >= 50)  # what recipes keep


def make_data(root: Path, megabytes: int, folders: list[Path]) -> None:
    """Text as JSONL files of 25 MB, and a tokenizer."""
    done = root / "done.json"
    if done.exists() and json.loads(done.read_text()) == megabytes:
        return
    shutil.rmtree(root, ignore_errors=True)
    (root / "text").mkdir(parents=True)
    documents = sources(folders)
    # As with GPT-2's own, most of the text is of another kind than what it was trained on.
    training = [text for _, text in zip(range(6000), sources([]), strict=False)][::6]
    make_tokenizer(root / "tokenizer", training)
    left = megabytes * 1_000_000
    number, size = 0, 0
    out = (root / "text" / "000.jsonl").open("w")
    for number_of, text in enumerate(documents):
        line = json.dumps({"id": str(number_of), "text": text}) + "\n"
        out.write(line)
        size, left = size + len(line), left - len(text.encode())
        if size > 25_000_000:
            out.close()
            number, size = number + 1, 0
            out = (root / "text" / f"{number:03d}.jsonl").open("w")
        if left < 0:
            break
    out.close()
    if left > 0:
        print(f"(only {megabytes - left / 1e6:.0f} MB of text on this machine)")
    for file in sorted((root / "text").glob("*.jsonl")):
        lines = file.read_text().splitlines()
        table = pa.Table.from_pylist([json.loads(line) for line in lines])
        pq.write_table(table, file.with_suffix(".parquet"), row_group_size=1000)
    done.write_text(json.dumps(megabytes))


def make_tokenizer(folder: Path, texts: list[str]) -> None:
    """A tokenizer with GPT-2's regex and 50,257 tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=50_257,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))


# --- contenders: each a fresh process over part of the text


def penstock(files: list[str], tokenizer: str, out: str, backend: str) -> None:
    from penstock.prepare import Pipeline, recipe

    Pipeline(recipe("pretrain"), files, out, tokenizer, workers=CORES, backend=backend).run()


def datatrove(files: list[str], tokenizer: str, out: str) -> None:
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader, ParquetReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    folder = str(Path(files[0]).parent)
    names = Path(out + ".files")
    names.write_text("\n".join(Path(file).name for file in files))
    LocalPipelineExecutor(
        pipeline=[
            (ParquetReader if files[0].endswith("parquet") else JsonlReader)(
                folder, paths_file=str(names)
            ),
            DocumentTokenizer(
                output_folder=out,
                tokenizer_name_or_path=tokenizer + "/tokenizer.json",
                eos_token="<|endoftext|>",
                shuffle_documents=False,
            ),
        ],
        tasks=CORES,
        workers=CORES,
        logging_dir=out + ".logs",
    ).run()


def alone(files: list[str], tokenizer: str, backend: str, one_by_one: bool = False) -> None:
    """The tokenizer over text that is in memory, in as many fresh processes.

    By its own call for many texts, or as workers have it who need not share the interpreter: text
    by text, which is quicker for long ones.

    Prints the seconds from the start of the processes on, reading left out, and those of encoding.
    """
    context = multiprocessing.get_context("spawn")
    seconds = context.SimpleQueue()
    began = time.time()
    processes = [
        context.Process(
            target=_alone, args=(files[k::CORES], tokenizer, backend, one_by_one, began, seconds)
        )
        for k in range(CORES)
    ]
    for process in processes:
        process.start()
    found = [seconds.get() for _ in processes]
    print(max(whole for whole, _ in found), max(encoding for _, encoding in found))


def _alone(
    files: list[str], tokenizer: str, backend: str, one_by_one: bool, began: float, out: Any
) -> None:
    from penstock.text.tokenizer import open_tokenizer

    reading = time.time()
    texts = []
    for file in files:
        texts += pq.read_table(Path(file).with_suffix(".parquet"))["text"].to_pylist()
    batches = [
        pa.array(texts[at : at + 256], pa.large_string()) for at in range(0, len(texts), 256)
    ]
    reading = time.time() - reading
    opened = open_tokenizer(tokenizer, backend=backend, alone=one_by_one)  # type: ignore[arg-type]
    start = time.time()
    for batch in batches:
        opened.encode(batch)
    end = time.time()
    out.put((end - began - reading, end - start))


# --- measuring


def timed(name: str, *arguments: Any, which: int = 0) -> float:
    """Seconds of a contender in a fresh interpreter, whose start is on everybody's account."""
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import prepare, json; "
    code += f"prepare.{name}(*json.loads(sys.argv[1]))"
    start = time.perf_counter()
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, json.dumps(arguments)],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    taken = time.perf_counter() - start
    return float(ran.stdout.split()[-2:][which]) if name == "alone" else taken


def check(files: list[str], tokenizer: str, root: Path) -> None:
    """Penstock, on both backends, and datatrove write the same tokens."""
    from penstock import open_store

    found = []
    for backend in ("fast", "reference"):
        out = fresh(root)
        penstock(files[:1], tokenizer, out, backend)
        store = open_store(out)
        found.append(store.read(0, len(store), "sequence").copy())
    out = fresh(root)
    timed("datatrove", files[:1], tokenizer, out)
    theirs = np.concatenate([np.fromfile(f, np.uint16) for f in sorted(Path(out).glob("*.ds"))])
    assert np.array_equal(found[0], found[1]), "the backends differ"
    assert np.array_equal(found[0], theirs), "datatrove's tokens differ"


def main() -> None:
    """Run everything and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("build/bench-prepare"))
    parser.add_argument("--text", type=Path, action="append", default=[], help="more text, first")
    parser.add_argument("--format", choices=["jsonl", "parquet"], default="jsonl")
    parser.add_argument("--quick", action="store_true", help="60 MB of text rather than 400")
    parser.add_argument("--turns", type=int, default=3, help="of each contender; medians count")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args()
    megabytes = 60 if options.quick else 400
    root = options.data.absolute() / f"{megabytes}{'-more' if options.text else ''}"
    make_data(root, megabytes, options.text)
    files = [str(path) for path in sorted((root / "text").glob(f"*.{options.format}"))]
    tokenizer = str(root / "tokenizer")
    check(files, tokenizer, root)
    few = files[: max(2, 50 // 25)]  # for those that are slow
    text = {
        name: sum(Path(file).with_suffix(".jsonl").stat().st_size for file in part)
        for name, part in (("all", files), ("few", few))
    }
    runs: dict[str, tuple[str, Callable[[], float]]] = {
        "penstock, fast": ("all", lambda: timed("penstock", files, tokenizer, fresh(root), "fast")),
        "tokenizer alone, fast": ("all", lambda: timed("alone", files, tokenizer, "fast")),
        "tokenizer alone, one by one": (
            "all",
            lambda: timed("alone", files, tokenizer, "fast", True),  # noqa: FBT003
        ),
        "  encoding alone": ("all", lambda: timed("alone", files, tokenizer, "fast", which=1)),
        "penstock, fast, less text": (
            "few",
            lambda: timed("penstock", few, tokenizer, fresh(root), "fast"),
        ),
        "penstock, reference": (
            "few",
            lambda: timed("penstock", few, tokenizer, fresh(root), "reference"),
        ),
        "tokenizer alone, reference": ("few", lambda: timed("alone", few, tokenizer, "reference")),
        "datatrove": ("few", lambda: timed("datatrove", few, tokenizer, fresh(root))),
    }
    # By turns, since machines have faster and slower minutes: each ratio is of one turn.
    turns = [
        {name: text[part] / run() / 1e6 for name, (part, run) in runs.items()}
        for _ in range(options.turns)
    ]
    rates = {name: statistics.median(turn[name] for turn in turns) for name in runs}
    asked = [
        (f"{name} / {of}", [turn[name] / turn[of] for turn in turns], floor)
        for name, of, floor in (
            ("penstock, fast, less text", "datatrove", 12.0),
            ("penstock, fast", "datatrove", 12.0),
            ("penstock, fast", "tokenizer alone, fast", 0.6),
            ("penstock, fast", "tokenizer alone, one by one", 0.6),
            ("penstock, reference", "datatrove", 1.0),
        )
    ]
    named = ("penstock", "gigatoken", "tokenizers", "datatrove", "pyarrow")
    print(
        f"{text['all'] / 1e6:.0f} MB of text ({text['few'] / 1e6:.0f} for the slow) "
        f"in {options.format}, "
        f"{CORES} cores; "
        f"Python {platform.python_version()}, " + ", ".join(f"{n} {version(n)}" for n in named)
    )
    for name, rate in rates.items():
        print(f"{name:32} {rate:8.1f} MB/s")
    print()
    for name, found, floor in asked:
        got, spread = statistics.median(found), f"({min(found):.2f}–{max(found):.2f})"
        verdict = "ok" if got >= floor else "SHORT"
        print(f"{name:44} {got:7.2f} {spread:15} asked {floor:5.2f}   {verdict}")
    if options.json:
        ratios = {name: statistics.median(found) for name, found, _ in asked}
        options.json.write_text(json.dumps({"rates": rates, "ratios": ratios}, indent=1))


def fresh(root: Path) -> str:
    """An output folder that is not there yet."""
    out = root / "out"
    for path in (out, Path(f"{out}.logs")):
        shutil.rmtree(path, ignore_errors=True)
    return str(out)


if __name__ == "__main__":
    main()
