"""`penstock demo` runs as it says, and what it claims holds."""

from __future__ import annotations

import re
from pathlib import Path

from click.testing import CliRunner

from penstock.cli import main


def test_the_demo_kills_resumes_and_finds_the_same_batches(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["demo", "--dir", str(tmp_path / "demo")])
    assert result.exit_code == 0, result.output
    planned, delivered = (
        re.search(rf"{word} +(.*)", result.output)[1] for word in ("planned", "delivered")
    )
    assert planned == delivered
    assert "equal the undisturbed run's" in result.output
    assert (tmp_path / "demo" / "run.toml").exists()
