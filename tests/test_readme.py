"""The README's example prints what the README says it prints, and the guide's blocks run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from penstock.config import parse_config

ROOT = Path(__file__).resolve().parent.parent


def test_the_example_prints_what_stands_below_it(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    found = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", text, re.DOTALL)
    assert found is not None
    code, output = found.groups()
    (tmp_path / "build").mkdir()
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ran.stderr == ""
    assert ran.stdout == output


def test_every_room_of_the_map_exists_or_is_said_to_be_coming() -> None:
    rows = re.findall(r"^\| (`.*?) \| (.*) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(rows) > 8
    for names, what in rows:
        for name in re.findall(r"`([\w./]+)`", names):
            exists = (ROOT / "src" / "penstock" / name).exists()
            assert exists == (not what.startswith("*coming:*")), name


def test_the_guides_blocks_run_in_their_order(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "guide.md").read_text(), re.DOTALL)
    assert len(blocks) > 4
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", "\n".join(blocks)],
        cwd=tmp_path,
        env=os.environ | {"PENSTOCK_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stderr == ""


def test_the_guides_toml_is_a_config_that_is_understood() -> None:
    (toml,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "guide.md").read_text(), re.DOTALL)
    assert parse_config(toml).packing == "best_fit_decreasing"
