"""Fixtures for all tests of streams."""

from __future__ import annotations

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

    if threads_of_ours():
        gc.collect()
    assert threads_of_ours() == []


@pytest.fixture(scope="session")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_corpora(tmp_path_factory.mktemp("corpora"))
