"""`penstock state`: states shown and edited, as a trainer's restart would load them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tests.loader.support import Endless, write_store

from penstock.cli import main
from penstock.run import load_run, open_run

RUN = """
[run]
batch_size = 4
seq_len = 8
seed = 3

[data]
num_workers = 0
"""


def source(root: Path, name: str, weight: float, seed: int) -> str:
    path = root / name
    if not path.exists():
        write_store(path, 60, seed=seed)
    return f'[[data.datasets]]\npath = "{path.as_posix()}"\nweight = {weight}\n'


@pytest.fixture
def run(tmp_path: Path) -> Path:
    text = RUN + source(tmp_path, "web", 3, 0) + source(tmp_path, "code", 1, 1)
    (tmp_path / "run.toml").write_text(text)
    return tmp_path / "run.toml"


@pytest.fixture
def state(run: Path) -> Path:
    loader = open_run(load_run(run))
    batches = Endless(loader)
    for _ in range(12):
        next(batches)
    path = run.with_name("state.json")
    path.write_text(json.dumps(loader.state_dict()))
    return path


def call(*arguments: Any) -> Result:
    return CliRunner().invoke(main, ["state", *map(str, arguments)])


def edited(state: Path, *arguments: Any) -> dict[str, Any]:
    out = state.with_name("new.json")
    result = call("edit", state, *arguments, "-o", out, "--overwrite")
    assert result.exit_code == 0, result.output
    assert str(out) in result.stdout
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_show_tells_where_a_state_is_and_what_its_sources_gave(run: Path, state: Path) -> None:
    result = call("show", state)
    assert result.exit_code == 0
    first, *rest = result.stdout.splitlines()
    assert first == f"{state}: step 12, position 48, epoch 0"
    assert rest[0].split()[:2] == ["web", "75.0%"]
    facts = json.loads(call("show", state, "--json").stdout)
    counts = open_run(load_run(run)).sampler.order.counts(48).tolist()  # type: ignore[union-attr]
    assert [each["given"] for each in facts["sources"].values()] == counts
    assert facts["stages"][0]["weights"] == {"web": 0.75, "code": 0.25}


def test_the_edited_state_loads_and_goes_on_without_the_steps_left_out(
    run: Path, state: Path
) -> None:
    whole = Endless(open_run(load_run(run)))
    batches = [next(whole)["input_ids"].tolist() for _ in range(16)]
    new = edited(state, "--back-to", 5, "--skip", "7-9", "--skip", 12)
    assert (new["step"], new["skipped"]) == (5, [[28, 40], [48, 52]])
    loader = open_run(load_run(run))
    loader.load_state_dict(new)
    again = Endless(loader)
    for step in (5, 6, 10, 11, 13, 14):
        assert loader.step == step
        assert next(again)["input_ids"].tolist() == batches[step]
    state.write_text(json.dumps(loader.state_dict()))
    sources = json.loads(call("show", state, "--json").stdout)["sources"].values()
    assert sum(each["given"] for each in sources) == 60
    assert sum(each["left_out"] for each in sources) == 16


def test_weights_and_documents_of_an_edit_are_shown(tmp_path: Path, state: Path) -> None:
    listed = tmp_path / "bad.txt"
    listed.write_text("web:1-3  # spam\n\n# all of these\ncode:9\n")
    out = tmp_path / "new.json"
    result = call("edit", state, "--weight", "code=0.4", "--exclude", "web:2-7",
                  "--exclude-file", listed, "-o", out)  # fmt: skip
    assert result.exit_code == 0
    assert "code                        40.0%" in result.stdout
    assert "7 documents of web are excluded" in result.stdout
    new = json.loads(out.read_text())
    assert new["identity"]["excluded"] == {"web": [[1, 8, 48]], "code": [[9, 10, 48]]}


def test_a_source_is_added_from_the_run_that_has_it(run: Path, state: Path) -> None:
    more = run.with_name("more.toml")
    more.write_text(run.read_text() + source(run.parent, "math", 9, 2))
    new = edited(state, "--run", more, "--add", "math=0.5", "--exclude", "math:59")
    loader = open_run(load_run(more))
    loader.load_state_dict(new)
    assert loader.state_dict() == new
    facts = json.loads(call("show", state.with_name("new.json"), "--json").stdout)
    assert facts["stages"][-1]["weights"]["math"] == 0.5
    assert facts["sources"]["math"]["given"] == 0


def test_a_source_is_removed_with_and_without_the_run(run: Path, state: Path) -> None:
    less = run.with_name("less.toml")
    less.write_text(RUN + source(run.parent, "code", 1, 1))
    for arguments in (["--remove", "web"], ["--remove", "web", "--run", less], ["--run", less]):
        new = edited(state, *arguments)
        loader = open_run(load_run(less))
        loader.load_state_dict(new)
        assert loader.stats()["samples_by_source"] == {"code": 0}
        assert "removed" in call("show", state.with_name("new.json")).stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--weight", "code"], "--weight takes NAME=SHARE, like code=0.3, not 'code'"),
        (["--weight", "code=much"], "--weight takes NAME=SHARE, like code=0.3, not 'code=much'"),
        (["--skip", "4-"], "--skip takes a number or a range, like 120 or 120-140, not '4-'"),
        (["--skip", "4-5"], "the run is at step 12, and 4 has been"),
        (["--exclude", "web:x"], "--exclude takes a number or a range"),
        (["--exclude", "7"], "documents of 'data' are to be excluded"),
        (["--remove", "books"], "'books' is no source of this state; it has ['web', 'code']"),
    ],
)
def test_a_wrong_option_is_one_line_and_writes_nothing(
    state: Path, arguments: list[str], said: str
) -> None:
    out = state.with_name("none.json")
    result = call("edit", state, *arguments, "-o", out)
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
    assert not out.exists()


def test_a_document_that_is_not_there_is_found_with_the_run(run: Path, state: Path) -> None:
    out = state.with_name("none.json")
    result = call("edit", state, "--exclude", "web:60", "--run", run, "-o", out)
    assert result.exit_code == 2
    assert "60 documents, and 60 is none of them" in result.stderr


def test_what_holds_no_state_and_what_exists_already_are_refused(state: Path) -> None:
    other = state.with_name("other.json")
    other.write_text("[1]")
    for arguments in (["show", other], ["edit", other, "-o", state.with_name("n.json")]):
        result = call(*arguments)
        assert result.exit_code == 2
        assert "other.json holds no state: save one with json.dump" in result.stderr
    result = call("edit", state, "--skip", "13", "-o", state)
    assert result.exit_code == 2
    assert "exists already: write elsewhere, or pass --overwrite" in result.stderr


@pytest.mark.parametrize("command", ["show", "edit"])
def test_each_command_of_the_group_has_help_with_an_example(command: str) -> None:
    result = call(command, "--help")
    assert result.exit_code == 0
    assert f"penstock state {command}" in result.output.split("Example:", 1)[1]
