"""Masks for attention kernels, against a dense reference and torch's own block masks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from penstock import ConfigError, attention


def some_ids(rows: int, length: int, seed: int) -> torch.Tensor:
    """Documents of many lengths, one of them a row's all."""
    random = np.random.default_rng(seed)
    found = []
    for row in range(rows):
        lengths = [length] if row == 0 else random.integers(1, max(length // 3, 2), length).tolist()
        found.append(np.repeat(np.arange(len(lengths)), lengths)[:length])
    return torch.from_numpy(np.stack(found))


def naive(ids: torch.Tensor) -> torch.Tensor:
    rows, length = ids.shape
    found = torch.zeros(rows, 1, length, length, dtype=torch.bool)
    for b in range(rows):
        for q in range(length):
            for k in range(q + 1):
                found[b, 0, q, k] = ids[b, q] == ids[b, k]
    return found


@pytest.mark.parametrize("length", [1, 7, 33])
def test_a_token_sees_those_before_it_in_its_own_document(length: int) -> None:
    ids = some_ids(3, length, seed=length)
    assert torch.equal(attention.dense_mask(ids), naive(ids))


@pytest.mark.parametrize(
    ("length", "block"), [(256, 128), (300, 64), (64, 16), (100, 128), (1, 16)]
)
@pytest.mark.parametrize("seed", [0, 1])
def test_block_masks_are_those_that_torch_finds_by_looking_at_every_pair(
    length: int, block: int, seed: int
) -> None:
    ids = some_ids(4, length, seed)
    ours = attention.block_mask(ids, block)
    theirs = create_block_mask(
        attention.mask_mod(ids), 4, None, length, length, device="cpu", BLOCK_SIZE=block
    )
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    for name in ("kv_num_blocks", "full_kv_num_blocks"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    for counts, order in (
        ("kv_num_blocks", "kv_indices"), ("full_kv_num_blocks", "full_kv_indices")
    ):  # fmt: skip
        for b in range(4):
            for q, count in enumerate(getattr(ours, counts)[b, 0].tolist()):
                mine = getattr(ours, order)[b, 0, q, :count].tolist()
                assert mine == sorted(getattr(theirs, order)[b, 0, q, :count].tolist())


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_attention_over_blocks_is_attention_under_the_dense_mask() -> None:
    torch.manual_seed(0)
    ids = some_ids(3, 200, seed=5)
    q, k, v = torch.randn(3, 3, 2, 200, 16).unbind(0)
    dense = scaled_dot_product_attention(q, k, v, attn_mask=attention.dense_mask(ids))
    blocks = flex_attention(q, k, v, block_mask=attention.block_mask(ids, 64))
    assert torch.allclose(dense, blocks, atol=1e-5)


def test_varlen_arguments_cut_a_batch_where_the_dense_mask_does() -> None:
    torch.manual_seed(0)
    ids = some_ids(3, 50, seed=7)
    q, k, v = torch.randn(3, 3, 2, 50, 8).unbind(0)
    dense = scaled_dot_product_attention(q, k, v, attn_mask=attention.dense_mask(ids))
    starts = attention.document_starts(ids) + torch.arange(3)[:, None] * 50
    bounds = [*torch.unique(starts).tolist(), 150]
    batch: dict[str, Any] = {
        "cu_seqlens": torch.tensor(bounds, dtype=torch.int32),
        "max_seqlen": int(np.diff(bounds).max()),
    }
    given = attention.varlen(batch)
    assert given.keys() == {"cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"}
    flat = [x.transpose(1, 2).reshape(150, 2, 8) for x in (q, k, v)]
    for lo, hi in zip(given["cu_seqlens_q"], given["cu_seqlens_q"][1:], strict=False):
        one = [x[lo:hi].transpose(0, 1)[None] for x in flat]
        out = scaled_dot_product_attention(*one, is_causal=True)[0].transpose(0, 1)
        assert torch.allclose(out, dense.transpose(1, 2).reshape(150, 2, 8)[lo:hi], atol=1e-5)


def test_a_batch_without_boundaries_says_how_to_get_them() -> None:
    with pytest.raises(ConfigError, match="no cu_seqlens: build its loader with pack_sequences"):
        attention.varlen({"input_ids": torch.zeros(1, 1)})
