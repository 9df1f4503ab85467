"""`penstock demo`: a mixture with a phase switch, killed in mid-epoch and resumed, batch by batch.

The text is what every machine has: the standard library's own sources, and the prose of its
docstrings. Tokens are bytes, with 256 for the end of a document.
"""

from __future__ import annotations

import ast
import json
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import click

EOS = 256
SEQ_LEN, BATCH, STEPS, PHASE_STEP, SEED = 256, 16, 400, 200, 7
RUN = """\
[data]
pack_sequences = true

[[data.datasets]]
path = "{root}/code"
weight = 0.8

[[data.datasets]]
path = "{root}/prose"
weight = 0.2

[[data.phases]]
start_step = {phase}
dataset_weights = {{ code = 0.3, prose = 0.7 }}
"""

# What each rank of the demo's training run does; its own process, so that it can be killed.
CHILD = "import sys; from penstock.cli.demo import train; train(*sys.argv[1:])"


@click.command(
    epilog="Example: penstock demo --dir build/demo",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.option(
    "--dir",
    "root",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("build/demo"),
    show_default=True,
    help="Where its stores and logs go.",
)
def demo(root: Path) -> None:
    """Show a run that is killed and goes on with the very same batches."""
    root.mkdir(parents=True, exist_ok=True)
    for name, documents in (("code", sources), ("prose", docstrings)):
        count, tokens = write(root / name, documents())
        click.echo(f"{name:6} {count:6,} documents {tokens:11,} tokens   {root / name}")
    (root / "run.toml").write_text(RUN.format(root=root.as_posix(), phase=PHASE_STEP))

    click.echo(f"\n1. {STEPS} steps of {BATCH} x {SEQ_LEN} tokens, undisturbed, on one rank")
    whole = finish(start(root / "undisturbed", root, 0, 1), root / "undisturbed")
    planned, delivered = counts(root / "undisturbed")
    click.echo(f"   planned   {planned}\n   delivered {delivered}")

    click.echo("\n2. the same on two ranks, both killed by SIGKILL in mid-epoch")
    log = root / "interrupted"
    ranks = [start(log, root, rank, 2) for rank in (0, 1)]
    while min(lines(log, rank) for rank in (0, 1)) < STEPS * BATCH // 6:
        if any(each.poll() is not None for each in ranks):
            raise SystemExit("a training process ended before it could be killed")
        time.sleep(0.01)
    for each in ranks:
        each.send_signal(signal.SIGKILL)
        each.wait()
    state = checkpoint(log)
    _replace(log / "begin.json", json.dumps(state))
    size, position = len(json.dumps(state)), state["position"]
    click.echo(f"   the state is {size} bytes of JSON and says: position {position}")

    click.echo("\n3. resumed from that state on one rank")
    rows = finish(start(log, root, 0, 1, fresh=False), log)
    if rows != whole:
        raise SystemExit("the batches differ from the undisturbed run's: please report this")
    click.echo(f"   all {len(rows):,} samples of {STEPS} batches equal the undisturbed run's")
    click.echo(f"\nNext: look at {root / 'run.toml'}, change it, and run it again.")


def sources() -> Iterator[bytes]:
    """The standard library's files, in order of name, about 12 MB of them."""
    left = 12_000_000
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if {"site-packages", "test", "tests"} & set(file.parts) or left < 0:
            continue
        text = file.read_bytes()
        left -= len(text)
        yield text


def docstrings() -> Iterator[bytes]:
    """The prose in them."""
    for source in sources():
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError):
            continue  # of another encoding or Python: its code is a document all the same
        nodes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        for node in ast.walk(tree):
            text = ast.get_docstring(node) if isinstance(node, nodes) else None
            if text:
                yield text.encode()


def write(out: Path, documents: Iterator[bytes]) -> tuple[int, int]:
    """Documents as a store of bytes; what they come to."""
    import numpy as np

    from penstock.store import ShardWriter

    count = tokens = 0
    metadata = {"eos_token_id": EOS, "tokenizer": "bytes"}
    with ShardWriter(out, {"sequence": "uint16"}, metadata=metadata, overwrite=True) as writer:
        for text in documents:
            ids = np.append(np.frombuffer(text, np.uint8).astype(np.uint16), np.uint16(EOS))
            writer.append({"sequence": ids})
            count, tokens = count + 1, tokens + len(ids)
    return count, tokens


def start(
    log: Path, root: Path, rank: int, world: int, *, fresh: bool = True
) -> subprocess.Popen[bytes]:
    """A rank of the run in a process of its own."""
    log.mkdir(exist_ok=True)
    if fresh and rank == 0:
        for file in log.iterdir():
            file.unlink()
    arguments = [str(log), str(root / "run.toml"), str(rank), str(world)]
    return subprocess.Popen([sys.executable, "-c", CHILD, *arguments])


def finish(process: subprocess.Popen[bytes], log: Path) -> dict[int, str]:
    """Wait for the run and read its log."""
    if process.wait():
        raise SystemExit(f"the training process ended with code {process.returncode}")
    return positions(log)


def train(log: str, config: str, rank: str, world: str) -> None:
    """Log a digest of every sample by its position, and the state after every batch."""
    from penstock.build import build_dataloader

    folder, r, w = Path(log), int(rank), int(world)
    loader = build_dataloader(
        config, batch_size=BATCH // w, seq_len=SEQ_LEN, seed=SEED, rank=r, world_size=w
    )
    if (begin := folder / "begin.json").exists():
        loader.load_state_dict(json.loads(begin.read_text()))
    began, counted = loader.position, [0, 0]
    with (folder / f"rank{r}of{w}.log").open("a") as lines:
        while loader.step < STEPS:
            for batch in loader:
                start = loader.position - BATCH
                for i, row in enumerate(batch["input_ids"].numpy()):
                    digest = blake2b(row.tobytes(), digest_size=8).hexdigest()
                    lines.write(f"{start + r + w * i} {digest}\n")
                for k in batch["dataset_idx"].tolist():
                    counted[k] += 1
                lines.flush()
                _replace(folder / f"state{r}.json", json.dumps(loader.state_dict()))
                if loader.step >= STEPS:
                    break
    plan = dict(zip(("code", "prose"), planned(loader, began), strict=True))
    done = dict(zip(("code", "prose"), counted, strict=True))
    _replace(folder / "counts.json", json.dumps([plan, done]))


def checkpoint(log: Path) -> dict[str, Any]:
    """The state that all ranks have reached: no trainer keeps them in step, so the least one."""
    states = [json.loads(file.read_text()) for file in sorted(log.glob("state*.json"))]
    return min(states, key=lambda state: state["position"])


def planned(loader: object, began: int) -> list[int]:
    """Samples of each source from `began` to the end, by arithmetic on the order alone."""
    from penstock.loader import StatefulDataLoader
    from penstock.sampler import MixtureSampler

    assert isinstance(loader, StatefulDataLoader)
    assert isinstance(loader.sampler, MixtureSampler)
    order = loader.sampler.order
    given: list[int] = (order.counts(STEPS * BATCH) - order.counts(began)).tolist()
    return given


def _replace(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    temporary.replace(path)


def positions(log: Path) -> dict[int, str]:
    """Position to digest over all ranks' logs; one logged twice must be the same both times."""
    found: dict[int, str] = {}
    for file in sorted(log.glob("rank*.log")):
        text = file.read_text()
        for line in text[: text.rfind("\n") + 1].splitlines():
            at, digest = line.split()
            if found.setdefault(int(at), digest) != digest:
                raise SystemExit(f"position {at} held two different samples: please report this")
    return found


def lines(log: Path, rank: int) -> int:
    """How many samples a rank of two has logged."""
    file = log / f"rank{rank}of2.log"
    return file.read_text().count("\n") if file.exists() else 0


def counts(log: Path) -> tuple[dict[str, int], dict[str, int]]:
    """What was planned and what was delivered, by source."""
    plan, done = json.loads((log / "counts.json").read_text())
    return plan, done
