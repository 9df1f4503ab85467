"""`penstock plan`: what it prints, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tests.loader.support import write_npy
from tests.text.tokenizers_for_tests import gpt2_like

from penstock import Pipeline
from penstock.cli import main
from penstock.prepare import recipe as built_in
from penstock.run import load_run, open_run

RUN = """
[run]
batch_size = 4
seq_len = 7
steps = 60

[data]
num_workers = 0
{data}

[[data.datasets]]
path = "{root}/web"
weight = 3.0

[[data.datasets]]
path = "{root}/code"
{source}

[[data.phases]]
start_step = 20
dataset_weights = {{ code = {weight} }}
lr_scale = 0.5
"""


def write(root: Path, name: str = "run.toml", **changed: Any) -> Path:
    for seed, (folder, length) in enumerate({"web": 1600, "code": 300}.items()):
        if not (root / folder).exists():
            write_npy(root / folder, [length], seed=seed)
    path = root / name
    values = {"root": root, "data": "", "source": "", "weight": 3.0} | changed
    path.write_text(RUN.format(**values))
    return path


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(main, ["plan", *map(str, arguments)])


def test_stages_sources_and_needs_are_printed_in_plain_columns(tmp_path: Path) -> None:
    result = run(write(tmp_path), "--step-time", 0.5)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "run.toml: steps 0 to 59, 240 samples, 1,680 tokens"
    assert lines[1] == "labels: 1,680 trained (100.00%)"
    assert lines[2] == "time: 30 s at 0.5 s a step"
    columns = {line.split()[0]: line.split() for line in lines if "%" in line}
    assert columns["0–19"][1:6] == ["×", "1", "web", "75.000%", columns["0–19"][5]]
    assert columns["20–59"][1:5] == ["×", "0.5", "web", "50.000%"]
    for words in ("sources:", "repeats from step", "disk: stores", "read rate:", "tokens/s"):
        assert words in result.stdout
    assert "\x1b" not in result.stdout


def test_json_says_the_same_in_numbers(tmp_path: Path) -> None:
    path = write(tmp_path)
    found = json.loads(run(path, "--json", "--step-time", 2).stdout)
    counts = open_run(load_run(path)).sampler.order.counts(240).tolist()
    assert [each["samples"] for each in found["total"]] == counts
    assert (found["steps"], found["tokens"], found["seconds"]) == (60, 1680, 120.0)
    assert [stage["lr_scale"] for stage in found["stages"]] == [1.0, 0.5]
    assert found["labels"]["how"] == "exact"
    assert found["sources"][1]["repeats_at"]


def test_options_come_before_the_file(tmp_path: Path) -> None:
    options = ["--steps", 9, "--batch-size", "0:2,5:4", "--seq-len", 5, "--world-size", 3]
    result = run(write(tmp_path), *options, "--accumulation", 2, "--seed", 4, "--json")
    found = json.loads(result.stdout)
    assert found["run"] == {
        "batch_size": [[0, 2], [5, 4]],
        "seq_len": 5,
        "seed": 4,
        "world_size": 3,
        "accumulation": 2,
    }
    assert found["samples"] == (5 * 2 + 4 * 4) * 3 * 2
    assert run(write(tmp_path), "--batch-size", "4x").exit_code == 2


@pytest.mark.parametrize(("policy", "code"), [("error", 1), ("warn", 0)])
def test_a_cap_that_is_passed_is_what_the_config_says(
    tmp_path: Path, policy: str, code: int
) -> None:
    path = write(tmp_path, data=f'on_max_epochs = "{policy}"', source="max_epochs = 2")
    result = run(path)
    assert result.exit_code == code
    word = "Error" if code else "Warning"
    assert result.stderr.startswith(f"{word}: 'code' is capped at 2 epochs, and the run goes past")
    assert "would keep it" in result.stderr
    assert "sources:" in result.stdout
    kept = write(tmp_path, data=f'on_max_epochs = "{policy}"', source="max_epochs = 20")
    assert (run(kept).exit_code, run(kept).stderr) == (0, "")


def test_the_picture_is_written_and_its_suffix_decides(tmp_path: Path) -> None:
    path = write(tmp_path)
    result = run(path, "--plot", tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert f"drawn to {tmp_path}/plan.png" in result.stdout
    run(path, "--plot", tmp_path / "plan.svg", "--json")
    assert "step 20: lr × 0.5" in (tmp_path / "plan.svg").read_text()
    wrong = run(path, "--plot", tmp_path / "plan.pdf")
    assert (wrong.exit_code, "as .png or .svg" in wrong.stderr) == (2, True)


def test_a_diff_says_what_changes_and_from_which_step(tmp_path: Path) -> None:
    a, b = write(tmp_path), write(tmp_path, "other.toml", weight=9.0)
    result = run(a, "--diff", b)
    assert result.stdout.startswith(
        "run.toml → other.toml: the first batch that differs is of step 2"
    )
    assert "share of code  50.0000%  75.0000%" in result.stdout
    assert "samples of code" in result.stdout
    found = json.loads(run(a, "--diff", b, "--json").stdout)["diff"]
    assert found["step"] >= 20
    assert found["other"]["tokens"] == 1680
    assert "all batches are the same" in run(a, "--diff", a).stdout


def test_what_is_left_after_a_state_is_planned(tmp_path: Path) -> None:
    path = write(tmp_path)
    loader = open_run(load_run(path))
    batches = iter(loader)
    for _ in range(30):
        next(batches)
    state = tmp_path / "state.json"
    state.write_text(json.dumps(loader.state_dict()))
    result = run(path, "--from-state", state)
    assert result.stdout.startswith("run.toml: steps 30 to 59, 120 samples")
    assert run(path, "--from-state", state, "--diff", path).exit_code == 0
    for text, words in (("{", "is not JSON"), ("[]", "is no state"), ("{}", "not a state")):
        state.write_text(text)
        wrong = run(path, "--from-state", state)
        assert (wrong.exit_code, wrong.stdout) == (2, "")
        assert words in wrong.stderr
        assert wrong.stderr.count("\n") == 1


def test_labels_that_are_estimates_wear_a_tilde_until_they_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.forecast.makeup.LOOKED_AT", 0)
    (tmp_path / "tokenizer").mkdir()
    vocabulary = {"model": {"type": "BPE", "vocab": {"<eos>": 3}}, "added_tokens": []}
    (tmp_path / "tokenizer" / "tokenizer.json").write_text(json.dumps(vocabulary))
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    data = f'packing = "best_fit_crop"\ntokenizer_path = "{tmp_path}/tokenizer"'
    path = write(tmp_path, data=data)
    result = run(path)
    assert "~" in result.stdout.splitlines()[1]
    assert "--count counts them" in result.stdout
    assert "~" not in run(path, "--count").stdout


def test_what_cannot_be_planned_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    path = write(tmp_path)
    (tmp_path / "code" / "part_000.npy").unlink()
    result = run(path)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "No files match" in result.stderr


def test_what_preparing_left_out_is_told_with_what_packing_did(tmp_path: Path) -> None:
    lines = [json.dumps({"text": "the quick brown fox " * n}) for n in range(1, 60)]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, '{"no": "text"}']))
    recipe = built_in("pretrain")
    pipeline = Pipeline(
        recipe, tmp_path / "a.jsonl", tmp_path / "s", gpt2_like(), workers=0, policy="reject",
        max_rejects=0.1,
    )  # fmt: skip
    pipeline.run()
    path = tmp_path / "run.toml"
    table = f'dataset_path = "{tmp_path}/s"\npacking = "best_fit_crop"\n'
    path.write_text(f"[run]\nbatch_size = 2\nseq_len = 16\n\n[data]\n{table}")
    result = run(path)
    assert result.exit_code == 0, result.output
    assert "when s was prepared: 2 documents filtered, 1 rejected" in result.stdout
    row = next(line for line in result.stdout.splitlines() if line.count("%") == 6)
    assert "16,872 (94.87%)" in row  # cropped off
    assert "0–27   × 1  s" in result.stdout
