"""What attention kernels need to keep documents apart, from a batch's own boundaries.

    batch = next(iter(loader))                       # with pack_sequences, or packing
    flash_attn_varlen_func(q, k, v, **varlen(batch), causal=True)    # q, k, v: (B * T, heads, dim)
    flex_attention(q, k, v, block_mask=block_mask(batch["doc_ids"]))  # (B, heads, T, dim)
    scaled_dot_product_attention(q, k, v, attn_mask=dense_mask(batch["doc_ids"]))

A token attends to those before it in its own document, itself included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128  # tokens of a block's side: FlexAttention's own


def varlen(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of FlashAttention's `varlen` functions for a batch's (B * T) tokens in a row.

    >>> found = varlen({"cu_seqlens": torch.tensor([0, 3, 8], dtype=torch.int32), "max_seqlen": 5})
    >>> found["cu_seqlens_k"].tolist(), found["max_seqlen_q"]
    ([0, 3, 8], 5)
    """
    try:
        cu_seqlens, longest = batch["cu_seqlens"], batch["max_seqlen"]
    except KeyError as missing:
        raise ConfigError(
            f"this batch has no {missing.args[0]}: build its loader with pack_sequences, or packing"
        ) from None
    both = ("q", "k")
    return {f"cu_seqlens_{x}": cu_seqlens for x in both} | {
        f"max_seqlen_{x}": longest for x in both
    }


def dense_mask(doc_ids: Tensor) -> Tensor:
    """Which token (second to last axis) sees which (last axis): (B, 1, T, T) bool.

    >>> dense_mask(torch.tensor([[0, 0, 1]]))[0, 0].int().tolist()
    [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    """
    same = doc_ids[:, None, :, None] == doc_ids[:, None, None, :]
    return same & torch.ones(same.shape[-2:], dtype=torch.bool, device=doc_ids.device).tril()


def mask_mod(doc_ids: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The same for FlexAttention, as a function of batch, head and places."""

    def sees(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:  # noqa: ARG001 - its signature
        return (q >= kv) & (doc_ids[b, q] == doc_ids[b, kv])

    return sees


def block_mask(doc_ids: Tensor, block_size: int = BLOCK) -> BlockMask:
    """FlexAttention's mask of blocks, by arithmetic on where documents begin.

    `create_block_mask` looks at all T × T pairs to find the same blocks.
    """
    from torch.nn.attention.flex_attention import BlockMask  # noqa: PLC0415 - slow to import

    length = doc_ids.shape[1]
    starts = document_starts(doc_ids)
    blocks = -(-length // block_size)
    first = torch.arange(blocks, device=doc_ids.device) * block_size
    last = (first + block_size - 1).clamp(max=length - 1)
    lowest = starts[:, first] // block_size  # of a query block, the first block that is seen
    # Before the diagonal a block is seen whole where the last query's document began at or before
    # it, and where there is a whole block of queries.
    whole_from = -(-starts[:, last] // block_size)
    number = torch.arange(blocks, device=doc_ids.device)
    query, key = number[:, None], number[None, :]
    seen = (key >= lowest[..., None]) & (key <= query)
    full = seen & (key < query) & (key >= whole_from[..., None]) & (query < length // block_size)
    partial = seen & ~full
    return BlockMask.from_kv_blocks(
        *_listed(partial),
        *_listed(full),
        BLOCK_SIZE=block_size,
        mask_mod=mask_mod(doc_ids),
        seq_lengths=(length, length),
    )


def document_starts(doc_ids: Tensor) -> Tensor:
    """Of each token the place at which its document begins in the row: (B, T).

    >>> document_starts(torch.tensor([[0, 0, 1, 1]])).tolist()
    [[0, 0, 2, 2]]
    """
    place = torch.arange(doc_ids.shape[1], device=doc_ids.device)
    begins = torch.ones_like(doc_ids, dtype=torch.bool)
    begins[:, 1:] = doc_ids[:, 1:] != doc_ids[:, :-1]
    return torch.where(begins, place, 0).cummax(dim=1).values


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of each query block, and which, those first: with an axis for heads."""
    counts = blocks.sum(-1, dtype=torch.int32)
    order = blocks.int().argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return counts[:, None], order[:, None]
