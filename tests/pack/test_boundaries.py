"""Documents in rows: arrays against a loop over the tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.pack.naive import Naive, after_eos, naive

from penstock.pack import Boundaries, Documents, eos_cuts
from penstock.pack.boundaries import _KEPT

EOS = 0
TOKENS = st.integers(1, 5).flatmap(
    lambda rows: st.integers(2, 9).flatmap(
        lambda width: st.lists(
            st.lists(st.sampled_from([EOS, EOS, 1, 2]), min_size=width, max_size=width),
            min_size=rows,
            max_size=rows,
        )
    )
)


def as_lists(found: Boundaries) -> Naive:
    return Naive(
        doc_ids=found.doc_ids.tolist(),
        position_ids=found.position_ids.tolist(),
        ignored=found.ignored.tolist(),
        cu_seqlens=found.cu_seqlens.tolist(),
        max_seqlen=found.max_seqlen,
    )


def documents(rows: list[list[int]], dtype: str = "uint16") -> Documents:
    tokens = np.array(rows, dtype)
    return Documents.of(eos_cuts(tokens, EOS), *tokens.shape)


@given(TOKENS)
def test_masks_are_those_of_a_loop_over_the_tokens(rows: list[list[int]]) -> None:
    found = documents(rows).batch(0, len(rows))
    assert as_lists(found) == naive(after_eos(rows, EOS))


@given(TOKENS)
def test_any_batch_cut_from_a_group_is_the_batch_computed_alone(rows: list[list[int]]) -> None:
    group = documents(rows)
    for lo in range(len(rows) + 1):
        for hi in range(lo + 1, len(rows) + 1):
            alone = documents(rows[lo:hi]).batch(0, hi - lo)
            assert as_lists(group.batch(lo, hi)) == as_lists(alone)


@given(TOKENS)
def test_what_varlen_attention_is_told_covers_every_input_once(rows: list[list[int]]) -> None:
    found = documents(rows).batch(0, len(rows))
    lengths = np.diff(found.cu_seqlens)
    assert (lengths > 0).all()
    assert found.cu_seqlens[-1] == found.doc_ids.size
    assert lengths.max() == found.max_seqlen
    starts = found.position_ids.reshape(-1) == 0
    assert np.flatnonzero(starts).tolist() == found.cu_seqlens[:-1].tolist()


@given(TOKENS)
def test_cuts_are_the_places_after_an_eos_that_are_not_a_row_start(rows: list[list[int]]) -> None:
    width = len(rows[0])
    expected = [
        row * width + column
        for row, flags in enumerate(after_eos(rows, EOS))
        for column, begin in enumerate(flags)
        if begin and column
    ]
    assert eos_cuts(np.array(rows, np.uint32), EOS).tolist() == expected


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64", "int32", "int64", ">u2"])
def test_eos_is_found_in_any_integer_dtype_at_its_very_end(dtype: str) -> None:
    top = int(np.iinfo(dtype).max)
    assert eos_cuts(np.array([[1, top, 1], [top, 1, top]], dtype), top).tolist() == [2, 4]


def test_a_row_of_one_document_has_no_cut() -> None:
    found = documents([[1, 2, 3, 4]]).batch(0, 1)
    assert as_lists(found) == Naive([[0, 0, 0]], [[0, 1, 2]], [], [0, 3], 3)


def test_an_eos_at_the_end_of_a_row_begins_nothing() -> None:
    found = documents([[1, 2, EOS], [3, 4, 5]]).batch(0, 2)
    assert as_lists(found) == Naive([[0, 0], [0, 0]], [[0, 1], [0, 1]], [], [0, 2, 4], 2)


def test_in_a_run_of_eos_each_one_is_a_document() -> None:
    found = documents([[EOS, EOS, EOS, 7]]).batch(0, 1)
    assert as_lists(found) == Naive([[0, 1, 2]], [[0, 0, 0]], [0, 1, 2], [0, 1, 2, 3], 1)


def test_a_document_that_begins_with_the_last_label_is_no_input() -> None:
    found = documents([[1, 2, EOS, 9]]).batch(0, 1)
    assert as_lists(found) == Naive([[0, 0, 0]], [[0, 1, 2]], [2], [0, 3], 3)


def test_rows_of_one_input_are_documents_of_one_token() -> None:
    found = documents([[EOS, 1], [1, 1], [1, EOS]]).batch(0, 3)
    assert as_lists(found) == Naive([[0], [0], [0]], [[0], [0], [0]], [0], [0, 1, 2, 3], 1)


def test_no_rows_are_an_empty_batch() -> None:
    found = Documents.of(np.empty(0, np.int64), 0, 5).batch(0, 0)
    assert found.doc_ids.shape == found.position_ids.shape == (0, 4)
    assert found.cu_seqlens.tolist() == [0]
    assert found.max_seqlen == 0


def test_rows_without_an_input_are_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="no input"):
        Documents.of(np.empty(0, np.int64), 3, 1)


def test_masks_are_int32_and_each_batch_has_its_own() -> None:
    group = documents([[1, EOS, 2, 3], [4, 5, EOS, 6]])
    first, again = group.batch(0, 1), group.batch(0, 1)
    for name in ("doc_ids", "position_ids", "cu_seqlens"):
        array = getattr(first, name)
        assert array.dtype == np.int32
        assert array.flags.c_contiguous
        assert not np.shares_memory(array, getattr(again, name))
        array[...] = -1
    assert as_lists(group.batch(0, 1)) == as_lists(again)


def test_a_batch_too_large_for_its_ramp_to_be_kept_is_no_different() -> None:
    width = _KEPT + 2
    found = Documents.of(np.array([5]), 1, width).batch(0, 1)
    assert found.position_ids[0, :7].tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert found.position_ids[0, -1] == width - 7
