"""Narrow windows to batches, here and at the device's edge: the two say the same, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.dataset.stores import as_lists, check_fresh

from penstock.batch import Place, Windows, merge, to_place
from penstock.errors import DataError
from penstock.pack import eos_cuts

CPU = Place(torch.device("cpu"))
DTYPES = ["uint8", "uint16", "uint32", "int16", "int32", "int64", "uint64"]


def windows(dtype: str, rows: int, width: int, seed: int, **options: bool) -> Windows:
    """Random rows of the dtype's whole range, above the sign bit too."""
    rng = np.random.default_rng(seed)
    top = min(int(np.iinfo(dtype).max), 2**63 - 1)
    tokens = rng.integers(0, top, (rows, width), np.uint64, endpoint=True).astype(dtype)
    tokens[rng.random(tokens.shape) < 0.3] = top
    found = Windows(tokens)
    if options.get("mask"):
        found.mask = rng.random(tokens.shape) < 0.5
    if options.get("pack"):
        found.cuts = eos_cuts(tokens, top)
    if options.get("mixed"):
        found.source = rng.integers(0, 3, rows)
    return found


def check_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    """The same keys, dtypes, shapes, layout and values."""
    assert list(one) == list(other)
    for key, value in one.items():
        if isinstance(value, torch.Tensor):
            assert (value.dtype, value.shape) == (other[key].dtype, other[key].shape)
            assert value.is_contiguous()
            assert other[key].is_contiguous()
            assert torch.equal(value, other[key])
        else:
            assert value == other[key]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("pack", [False, True])
def test_widening_there_is_widening_here(dtype: str, mask: bool, pack: bool) -> None:
    for seed, (rows, width) in enumerate([(1, 2), (1, 9), (4, 2), (5, 9), (3, 64)]):
        group = windows(dtype, rows, width, seed, mask=mask, pack=pack, mixed=True)
        for lo, hi in ((0, rows), (0, 1), (rows - 1, rows)):
            check_equal(group.batch(lo, hi, CPU), group.batch(lo, hi))


@given(
    st.sampled_from(DTYPES), st.integers(0, 4), st.integers(2, 7), st.integers(0, 99), st.booleans()
)
def test_a_batch_is_its_tokens_widened_and_shifted(
    dtype: str, rows: int, width: int, seed: int, mask: bool
) -> None:
    group = windows(dtype, rows, width, seed, mask=mask)
    batch = group.batch(0, rows)
    tokens = group.tokens.tolist()
    kept = np.ones((rows, width), bool) if group.mask is None else group.mask
    assert batch["input_ids"].tolist() == [row[:-1] for row in tokens]
    assert batch["labels"].tolist() == [
        [t if keep else -100 for t, keep in zip(row[1:], flags[1:], strict=True)]
        for row, flags in zip(tokens, kept.tolist(), strict=True)
    ]


@pytest.mark.parametrize("place", [None, CPU], ids=["here", "there"])
@pytest.mark.parametrize("dtype", ["uint16", "int64"])
def test_masking_labels_leaves_inputs_alone_in_a_batch_of_one_row(
    place: Place | None, dtype: str
) -> None:
    """One row's slice of a tensor is contiguous, so that `.contiguous()` is no copy of it."""
    tokens = np.array([[5, 6, 7, 8]], dtype)
    mask = np.array([[False, False, True, False]])
    batch = Windows(tokens, mask, cuts=np.array([2])).batch(0, 1, place)
    assert batch["input_ids"].tolist() == [[5, 6, 7]]
    assert batch["labels"].tolist() == [[-100, -100, -100]]
    assert tokens.tolist() == [[5, 6, 7, 8]]
    check_fresh(batch)


@pytest.mark.parametrize("place", [None, CPU], ids=["here", "there"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_batches_share_no_memory_with_their_group_or_one_another(
    place: Place | None, dtype: str
) -> None:
    group = windows(dtype, 6, 5, 0, mask=True, pack=True, mixed=True)
    assert group.mask is not None
    assert group.source is not None
    assert group.cuts is not None
    arrays = group.tokens, group.mask, group.source, group.cuts
    own = {str(i): torch.from_numpy(array.view("u1")) for i, array in enumerate(arrays)}
    spans = [(0, 1), (0, 1), (1, 2), (2, 6), (0, 6)]
    check_fresh(*[group.batch(lo, hi, place) for lo, hi in spans], own)


def test_the_labels_may_have_another_name() -> None:
    batch = Windows(np.array([[1, 2, 3]]), target="target_ids").batch(0, 1)
    assert as_lists(batch) == {"input_ids": [[1, 2]], "target_ids": [[2, 3]]}


# ---------------------------------------------------------------------------------------- merging


def test_merged_sources_keep_their_rows_masks_and_documents() -> None:
    plain = Windows(np.array([[1, 0, 2, 3], [4, 5, 6, 7]], np.uint16), cuts=np.array([2]))
    masked = Windows(
        np.array([[70_000, 8, 0, 9]], np.uint32),
        mask=np.array([[True, False, True, True]]),
        cuts=np.array([3]),
    )
    whole = merge([plain, masked], [np.array([2, 0]), np.array([1])])
    assert whole.tokens.dtype == np.uint32
    batch = as_lists(whole.batch(0, 3))
    assert batch["input_ids"] == [[4, 5, 6], [70_000, 8, 0], [1, 0, 2]]
    assert batch["labels"] == [[5, 6, 7], [-100, 0, -100], [0, -100, 3]]
    assert batch["doc_ids"] == [[0, 0, 0], [0, 0, 0], [0, 0, 1]]


@pytest.mark.parametrize("seed", range(5))
def test_any_batch_of_merged_sources_has_its_own_documents(seed: int) -> None:
    rng = np.random.default_rng(seed)
    parts = [windows("uint16", rows, 6, seed + rows, pack=True) for rows in (5, 3, 4)]
    places = np.split(rng.permutation(12), [5, 8])
    whole = merge(parts, places)
    for lo, hi in ((0, 12), (0, 5), (5, 6), (6, 12)):
        batch = whole.batch(lo, hi)
        alone = Windows(whole.tokens[lo:hi], cuts=eos_cuts(whole.tokens[lo:hi], 65_535))
        check_equal(batch, alone.batch(0, hi - lo))


def test_merging_never_makes_floats_of_tokens() -> None:
    big = 2**53 + 1
    parts = [Windows(np.array([[big, 1]], np.uint64)), Windows(np.array([[big, 2]], np.int64))]
    whole = merge(parts, [np.array([0]), np.array([1])])
    assert whole.batch(0, 2)["input_ids"].tolist() == [[big], [big]]


# ------------------------------------------------------------------------------- the device's edge


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What travels to a device, by fakes: ("pin", dtype, bytes), ("to", device, non_blocking)."""
    log: list[tuple[Any, ...]] = []

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        log.append(("pin", tensor.dtype, tensor.numel() * tensor.element_size()))
        return tensor.clone()

    to = torch.Tensor.to

    def spy(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if "non_blocking" in kwargs:
            log.append(("to", args[0], kwargs["non_blocking"]))
        return to(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch.Tensor, "to", spy)
    return log


def test_tokens_travel_as_narrow_as_they_are_stored(sent: list[tuple[Any, ...]]) -> None:
    place = Place(torch.device("cpu"), pin=True)
    group = windows("uint16", 4, 9, 0, mask=True, pack=True, mixed=True)
    expected = group.batch(0, 4)
    check_equal(group.batch(0, 4, place), expected)
    pinned = [event[1:] for event in sent if event[0] == "pin"]
    assert pinned[0] == (torch.int16, 4 * 9 * 2)
    assert (torch.bool, 4 * 8) in pinned
    wide = [dtype for dtype, _ in pinned if dtype == torch.int64]
    assert len(wide) == 2  # the few places that are ignored, and the source of each row
    assert all(event[2] is True for event in sent if event[0] == "to")


def test_without_pinning_the_copy_is_waited_for(sent: list[tuple[Any, ...]]) -> None:
    windows("uint16", 2, 3, 0).batch(0, 2, CPU)
    assert sent == [("to", torch.device("cpu"), False)]


def test_a_finished_batch_is_moved_with_all_its_lists(sent: list[tuple[Any, ...]]) -> None:
    batch = {"a": torch.ones(2), "b": [torch.ones(1), torch.ones(3)], "n": 3, "s": "x"}
    moved = to_place(batch, Place(torch.device("cpu"), pin=True))
    assert as_lists(moved) == as_lists(batch)
    assert [event[0] for event in sent] == ["pin", "to"] * 3


def test_tokens_that_int64_would_turn_negative_are_refused() -> None:
    top = np.array([[1, 2**63 - 1]], np.uint64)
    assert Windows(top).batch(0, 1)["labels"].tolist() == [[2**63 - 1]]
    with pytest.raises(DataError, match="holds the token 9223372036854775808, which no int64"):
        Windows(top + np.uint64(1))
    signed = Windows(np.array([[-1, 1]], np.int64))
    merged = merge([signed, Windows(top)], [np.array([0]), np.array([1])])
    assert merged.tokens.tolist() == [[-1, 1], [1, 2**63 - 1]]
