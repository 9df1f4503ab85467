"""Fixtures for all tests of streams."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.stream.support import threads_of_ours, write_corpora


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test session, so that nothing is left in the user's."""
    folder = tmp_path_factory.getbasetemp() / "cache"
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(folder))
    return folder


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    import gc

    for _ in range(100):  # one that is in the middle of a block ends with it
        if not threads_of_ours():
            break
        gc.collect()
        time.sleep(0.05)
    assert threads_of_ours() == []


@pytest.fixture(scope="session")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_corpora(tmp_path_factory.mktemp("corpora"))
