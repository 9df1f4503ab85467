"""The command line as a whole; what each command does is tested in a file of its own."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import penstock
from penstock.cli import COMMANDS, LazyGroup, main
from penstock.errors import DataError


def group_that_raises(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> click.Group:
    """A group like `main` with one command, `fail`, that raises `error`."""

    @click.command()
    def fail() -> None:
        raise error

    monkeypatch.setattr(f"{__name__}.fail", fail, raising=False)
    monkeypatch.setitem(COMMANDS, "fail", f"{__name__}:fail")
    return LazyGroup("test")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(name: str) -> None:
    result = CliRunner().invoke(main, [name, "--help"])
    assert result.exit_code == 0
    assert "Example" in result.output
    assert f"penstock {name}" in result.output.split("Example", 1)[1]


def test_the_list_of_commands_says_what_each_is_for() -> None:
    result = CliRunner().invoke(main, ["--help"])
    assert result.exit_code == 0
    assert "Example: penstock" in result.output
    for name in COMMANDS:
        command = main.get_command(click.Context(main), name)
        assert command is not None
        assert command.get_short_help_str(limit=200) in result.output.replace("\n", " ")


def test_version_shows_the_package_the_store_format_and_the_order() -> None:
    result = CliRunner().invoke(main, ["--version"])
    assert result.exit_code == 0
    assert result.output == (
        f"penstock {penstock.__version__} (store format 1, order {penstock.ORDER_VERSION})\n"
    )


def test_an_error_of_ours_is_one_line_on_stderr_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = group_that_raises(DataError("a.bin has 7 bytes,\nnot a multiple of 2"), monkeypatch)
    result = CliRunner().invoke(group, ["fail"])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr == "Error: a.bin has 7 bytes, not a multiple of 2\n"


def test_a_path_that_cannot_be_used_is_one_line_too(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(main, ["demo", "--dir", str(tmp_path / "file" / "below")])
    assert result.exit_code == 2
    assert result.stderr == f"Error: {tmp_path}/file/below: Not a directory\n"


def test_an_error_that_is_not_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(group_that_raises(ZeroDivisionError(), monkeypatch), ["fail"])
    assert isinstance(result.exception, ZeroDivisionError)


def test_ctrl_c_is_quiet_and_exits_130(monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(group_that_raises(KeyboardInterrupt(), monkeypatch), ["fail"])
    assert result.exit_code == 130
    assert result.output == ""


def test_an_unknown_command_is_refused_by_name() -> None:
    result = CliRunner().invoke(main, ["verfy"])
    assert result.exit_code == 2
    assert "No such command 'verfy'" in result.stderr
