"""Plain text as arrays: what is filtered and framed is what one document at a time would be."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.pack import framing
from penstock.prepare import plain

CHARACTERS = st.sampled_from([*"ab!~ \n\t\x00\x7f", "é", "日", "👍", "\u2003", "\u00a0"])
TEXTS = st.lists(st.text(CHARACTERS, max_size=30), max_size=8)


def rule(text: str, least: int, most: int) -> str | None:
    if len(text) < least:
        return "min_chars"
    if len(text) > most:
        return "max_chars"
    return None if text.strip() else "empty"


@given(TEXTS, st.integers(0, 20), st.integers(0, 20), st.integers(0, 8), st.integers(0, 8))
@settings(max_examples=300, deadline=None)
def test_each_text_is_filtered_by_the_first_rule_that_applies(
    texts: list[str], least: int, more: int, begin: int, count: int
) -> None:
    most = least + more
    array = pa.array(texts, pa.large_string()).slice(min(begin, len(texts)), count)
    found = plain.sifted(array, least, most)
    for i, text in enumerate(texts[begin : begin + count]):
        wanted = rule(text, least, most)
        assert [name for name, gone in found.items() if gone[i]] == ([wanted] if wanted else [])


@pytest.mark.parametrize("long", [0, 400])
@given(st.data())
@settings(max_examples=150, deadline=None)
def test_documents_are_framed_as_each_would_be_by_itself(long: int, data: Any) -> None:
    lengths = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=8))
    bos, eos = data.draw(st.sampled_from([None, 1])), data.draw(st.sampled_from([None, 2]))
    limit = data.draw(st.sampled_from([None, 1, 3, 20]))
    offsets = np.cumsum([0, *lengths])
    ids = np.arange(100, 100 + offsets[-1], dtype=np.uint32)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(framing, "LONG", long)
        found, bounds, cut = framing.framed(ids, offsets, bos=bos, eos=eos, limit=limit)
    whole = [
        [token for token in (bos, *ids[a:b].tolist(), eos) if token is not None]
        for a, b in pairwise(offsets)
    ]
    kept = [tokens[:limit] for tokens in whole]
    assert found.dtype == np.uint32
    assert found.tolist() == [token for tokens in kept for token in tokens]
    assert np.diff(bounds).tolist() == [len(tokens) for tokens in kept]
    assert cut == sum(map(len, whole)) - sum(map(len, kept))
