"""`penstock index` over real corpora."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from tests.text.tokenizers_for_tests import gpt2_like, stdlib_texts

from penstock.cli import main
from penstock.cli.index import summary
from penstock.errors import ConfigError
from penstock.stream import TextStream


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache directory of the test's own."""
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Two files of 60 documents, two of which are empty."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    source = stdlib_texts()[1]
    for name in "ab":
        texts = ["", *(source[9 * n : 9 * n + 40 + 17 * n] for n in range(59))]
        lines = [json.dumps({"body": text}) + "\n" for text in texts]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    return folder


def run(*arguments: object) -> Result:
    options = ["--tokenizer", gpt2_like(), "--seq-len", 64, "--text-field", "body"]
    return CliRunner().invoke(main, list(map(str, ["index", *arguments, *options])))


def test_it_says_what_a_stream_would_deliver(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "counts.jsonl"
    arguments = [corpus, "--lanes", 4, "--batch-size", 4, "--world-size", 2, "-o", out]
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    facts = json.loads(run(*arguments, "--json").stdout)
    assert (facts["files"], facts["documents"], facts["empty_documents"]) == (2, 120, 2)
    assert facts["rows"] * 65 == facts["tokens"] + facts["padding"]
    assert facts["steps"] == facts["rows"] // 8
    assert facts["rejected"] == {}
    assert facts["index"] == str(out)
    stream = TextStream(
        corpus,
        gpt2_like(),
        64,
        4,
        text_field="body",
        lanes=4,
        rank=1,
        world_size=2,
        steps="epoch",
        index=out,
    )
    assert len(stream) == facts["steps"] > 0
    lines = result.stdout.splitlines()
    assert lines == list(summary("the corpus of 2 files", facts))
    assert lines[0] == f"the corpus of 2 files: 2 files, {facts['units']} units"
    assert lines[1].startswith(f"120 documents (2 empty), {facts['tokens']:,} tokens: ")
    assert f"rows an epoch: {facts['rows']:,} of 65 tokens, " in lines[2]
    assert lines[-2] == f"steps an epoch: {facts['steps']:,} of 8 rows each, on 2 ranks"
    assert lines[-1] == f"The index is {out}"


def test_much_padding_is_said_with_the_lanes_that_would_do(corpus: Path) -> None:
    result = run(corpus, "--lanes", 24, "--world-size", 2)
    (note,) = (line for line in result.stdout.splitlines() if line.startswith("Note"))
    lanes = int(re.search(r"--lanes (\d+), a multiple of 2", note)[1])
    fewer = json.loads(run(corpus, "--lanes", lanes, "--json").stdout)
    assert 0 < lanes < 24
    assert fewer["padding_share"] < 0.07
    assert fewer["advised_lanes"] is None or fewer["padding_share"] > 0.05


def test_rejects_are_told_by_file_and_stop_it_unless_told_otherwise(corpus: Path) -> None:
    bad = corpus / "b.jsonl"
    with bad.open("a") as file:
        file.write("not json\n")
    stopped = run(corpus, "--lanes", 4)
    assert stopped.exit_code == 2
    assert stopped.stderr.startswith(f"Error: {bad}, line 61 ")
    done = run(corpus, "--lanes", 4, "--policy", "reject")
    assert done.exit_code == 0
    assert f"rejected: 1 of {bad}\n" in done.stdout


def test_what_crops_has_tokens_and_no_rows(corpus: Path) -> None:
    result = run(corpus, "--packing", "best_fit_crop", "--batch-size", 4)
    assert "rows an epoch: not known ahead" in result.stdout
    assert "steps" not in result.stdout.replace("a number of steps", "")


def test_an_epoch_too_short_for_a_step_is_said(corpus: Path) -> None:
    result = run(corpus, "--packing", "concat", "--batch-size", 10**6)
    assert "steps an epoch: none of 1,000,000 rows each, on 1 rank" in result.stdout


def test_the_command_of_the_error_is_the_one_that_mends_it(corpus: Path) -> None:
    def stream() -> TextStream:
        return TextStream(
            [corpus / "b.jsonl", corpus / "a.jsonl"],
            gpt2_like(),
            64,
            2,
            text_field="body",
            packing="concat",
            lanes=6,
            bos=True,
            eos=False,
            rank=0,
            world_size=1,
            steps="epoch",
        )

    with pytest.raises(ConfigError) as caught:
        stream()
    (command,) = re.findall("`(.*?)`", str(caught.value))
    result = CliRunner().invoke(main, shlex.split(command)[1:])
    assert result.exit_code == 0, result.output
    assert len(stream()) > 0


def test_lanes_that_the_ranks_do_not_divide_are_refused(corpus: Path) -> None:
    result = run(corpus, "--world-size", 7)
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: 240 lanes cannot be dealt evenly to 7 ranks")


def test_ctrl_c_says_what_is_kept_and_the_same_command_goes_on(
    corpus: Path, tmp_path: Path
) -> None:
    out = tmp_path / "counts.jsonl"
    arguments = ["index", corpus, "--tokenizer", gpt2_like(), "--seq-len", 64, "--lanes", 4]
    arguments += ["--text-field", "body", "--threads", 1, "-o", out]
    code = """
import os, signal, sys
from penstock.cli import main, progress
from penstock.stream import index
index.SHOWN = 0
show = progress.Bar.show
def interrupted(self, done, total, said):
    show(self, done, total, said)
    if done > total / 3: os.kill(os.getpid(), signal.SIGINT)
progress.Bar.show = interrupted
main()
"""
    ran = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 130
    assert ran.stdout == ""
    (line,) = (line for line in ran.stderr.splitlines() if line.startswith("Stopped"))
    kept, units = re.fullmatch(
        rf"Stopped: (\d+) of (\d+) units are counted and kept in {re.escape(str(out))}; the same "
        "command counts the rest",
        line,
    ).groups()
    assert 0 < int(kept) < int(units)
    assert len(out.read_bytes().splitlines()) == 1 + int(kept)
    assert "Traceback" not in ran.stderr
    assert run(corpus, "--lanes", 4, "-o", out).exit_code == 0
    assert len(out.read_bytes().splitlines()) == 1 + int(units)


def test_in_a_pipe_there_is_no_bar(corpus: Path) -> None:
    result = run(corpus, "--lanes", 1, "--packing", "concat")
    assert result.stderr == ""
