"""The cache folder, locks that die with their holder, files that are whole or absent."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from penstock.cache import cache_folder, locked, write_whole
from penstock.errors import ConfigError

HOLDER = """
import pathlib, sys, time
from penstock.cache import locked
with locked(pathlib.Path(sys.argv[1]), wait=False):
    print("held", flush=True)
    time.sleep(60)
"""


def test_the_cache_is_where_the_environment_says_else_below_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("PENSTOCK_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert cache_folder("a") == tmp_path / ".cache" / "penstock" / "a"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder("a") == tmp_path / "xdg" / "penstock" / "a"
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "own"))
    assert cache_folder("a") == tmp_path / "own" / "a"
    assert list(tmp_path.iterdir()) == []


def test_without_a_home_the_way_to_name_a_cache_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(_: object) -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("PENSTOCK_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", classmethod(nowhere))
    with pytest.raises(ConfigError, match="set PENSTOCK_CACHE_DIR"):
        cache_folder("a")


def test_a_lock_is_refused_while_another_process_holds_it_and_free_when_that_is_killed(
    tmp_path: Path,
) -> None:
    lock = tmp_path / "deep" / "lock"
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(lock)], stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(BlockingIOError), locked(lock, wait=False):
            pass
        process.kill()
    with locked(lock, wait=False):
        pass


def test_who_waits_for_a_lock_comes_after_its_holder(tmp_path: Path) -> None:
    lock, order = tmp_path / "lock", []

    def second() -> None:
        with locked(lock, wait=True):
            order.append("second")

    thread = threading.Thread(target=second)
    with locked(lock, wait=True):
        thread.start()
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_an_error_inside_frees_the_lock(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), locked(tmp_path / "lock", wait=False):
            _ = 1 // 0


def test_who_waited_for_a_lock_whose_file_is_removed_locks_the_next_one(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    got, leave = threading.Event(), threading.Event()

    def waiting() -> None:
        with locked(lock, wait=True):
            got.set()
            leave.wait(60)

    thread = threading.Thread(target=waiting)
    with locked(lock, wait=True):
        thread.start()
        lock.unlink()
    assert got.wait(60)
    with pytest.raises(BlockingIOError), locked(lock, wait=False):
        pass
    leave.set()
    thread.join()


def test_a_file_is_replaced_whole_or_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    write_whole(path, b"one")
    write_whole(path, b"two")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(path, b"three")
    assert path.read_bytes() == b"two"
    assert [each.name for each in tmp_path.iterdir()] == ["a.json"]
