"""The trainers' examples, run as a user runs them: killed, started again, the same batches."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.text.tokenizers_for_tests import gpt2_like, stdlib_texts
from torch.distributed.checkpoint.stateful import Stateful

from penstock.prepare import Pipeline, recipe

pytestmark = [pytest.mark.long, pytest.mark.examples]
EXAMPLES = Path(__file__).parents[2] / "examples"
LINE = re.compile(r"step (\d+) batch ([0-9a-f]{16})(?: loss ([\d.]+))?")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    texts = [text[:3000] for text in stdlib_texts()[:60]]
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    Pipeline(recipe("pretrain"), folder / "a.jsonl", folder / "store", gpt2_like(), workers=0).run()
    return folder / "store"


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}


def lines(command: list[Any], kill_after: int | None = None) -> dict[int, str]:
    """What a run prints of each step; killed with its children when it has printed that one."""
    found, everything = {}, []
    with subprocess.Popen(
        [sys.executable, *map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, env=environment(),
    ) as run:  # fmt: skip
        assert run.stdout is not None
        for line in run.stdout:
            everything.append(line)
            for step, batch, loss in LINE.findall(line):
                found[int(step)] = f"{batch} {loss}"
                if int(step) == kill_after:
                    whole = psutil.Process(run.pid)
                    for process in [*whole.children(recursive=True), whole]:
                        process.kill()
    assert run.returncode == (0 if kill_after is None else -9), "".join(everything)[-3000:]
    return found


def torchrun(processes: int, *arguments: Any) -> list[Any]:
    return ["-m", "torch.distributed.run", "--nproc-per-node", processes, *arguments]


def test_ddp_goes_on_with_other_processes_after_a_kill(store: Path, tmp_path: Path) -> None:
    script = [EXAMPLES / "train_ddp.py", store, "--steps", 14, "--every", 4, "--checkpoint"]
    whole = lines(torchrun(1, *script, tmp_path / "whole"))
    assert sorted(whole) == list(range(1, 15))
    killed = lines(torchrun(2, *script, tmp_path / "killed"), kill_after=7)
    resumed = lines(torchrun(1, *script, tmp_path / "killed"))
    assert min(resumed) == 5, "after the checkpoint of step 4"
    for step, line in {**killed, **resumed}.items():
        digest, loss = line.split()
        assert digest == whole[step].split()[0]
        assert abs(float(loss) - float(whole[step].split()[1])) < 2e-3
    assert sorted({**killed, **resumed}) == list(range(1, 15))


@pytest.mark.parametrize(
    ("script", "library"), [("train_hf.py", "accelerate"), ("train_lightning.py", "lightning")]
)
def test_trainers_go_on_after_a_kill_with_the_batches_that_would_have_come(
    store: Path, tmp_path: Path, script: str, library: str
) -> None:
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed: make test-examples has an environment with it")
    command = [EXAMPLES / script, store, "--steps", 14, "--output"]
    whole = lines([*command, tmp_path / "whole"])
    assert sorted(whole) == list(range(1, 15))
    killed = lines([*command, tmp_path / "killed"], kill_after=8)
    resumed = lines([*command, tmp_path / "killed"])
    assert min(resumed) == 6, "after the checkpoint of step 5"
    assert killed | resumed == whole


def adapter() -> Any:
    spec = spec_from_file_location("torchtitan_loader", EXAMPLES / "torchtitan_loader.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.PenstockLoader


def test_the_torchtitan_adapter_keeps_that_interface(store: Path, tmp_path: Path) -> None:
    toml = tmp_path / "run.toml"
    toml.write_text(f'[data]\ndataset_path = "{store}"\npacking = "best_fit_decreasing"\n')
    made = adapter()

    def build(rank: int, world: int, size: int) -> Any:
        return made.Config(run=str(toml), seed=3).build(
            dp_rank=rank, dp_world_size=world, tokenizer=None, seq_len=64, local_batch_size=size,
            snapshot_every_n_steps=None,
        )  # fmt: skip

    one = build(0, 1, 4)
    assert isinstance(one, Stateful)
    batches = list(islice(one, 300))
    inputs, labels = batches[0]
    assert inputs.keys() == {"input", "positions"}
    assert inputs["input"].shape == inputs["positions"].shape == labels.shape == (4, 64)

    ranks = [build(r, 2, 2) for r in range(2)]
    halves = [list(islice(rank, 40)) for rank in ranks]
    for k in range(40):
        rows = torch.stack([half[k][0]["input"] for half in halves], 1).flatten(0, 1)
        assert torch.equal(rows, batches[k][0]["input"])
    dcp.save({"dataloader": ranks[0]}, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    again = build(0, 1, 4)
    dcp.load({"dataloader": again}, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    for got, wanted in zip(islice(again, 20), batches[40:60], strict=True):
        assert torch.equal(got[0]["input"], wanted[0]["input"])
        assert torch.equal(got[1], wanted[1])
    again.load_state_dict({})
