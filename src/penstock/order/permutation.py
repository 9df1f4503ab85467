"""A shuffle that is a function: index in, index out, nothing stored.

    >>> shuffle = Permutation(10, key=1)
    >>> shuffle(np.arange(10)).tolist()
    [3, 5, 1, 0, 9, 6, 8, 2, 4, 7]
    >>> shuffle(np.array([9])).tolist()             # any place, without the others
    [7]

An eight-round Feistel network over a grid of `a` rows by 2^k columns that covers [0, n) with fewer
than 2^k <= sqrt(n) cells to spare: a cell past n is sent round again until it lands inside
("cycle walking"), which happens about once in sqrt(n) times. The halves are added to, one modulo
a and one modulo 2^k, by a keyed hash of the other half. Halves of a few bits mix slowly: eight
rounds gave some orders of 8 elements ten times as often as others, so up to 255 elements take four
such permutations in a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError, OutOfBounds
from penstock.order.hashing import U64, subkeys

ROUNDS = 8
SMALL, TURNS = 255, 4  # so few elements take so many permutations in a row
_HASH_1 = np.uint64(0xD6E8FEB86659FD93)
_HASH_2 = np.uint64(0xA0761D6478BD642F)
_S32 = np.uint64(32)
_ONE = np.uint64(1)
_ROUND_NUMBERS = np.arange(ROUNDS).reshape(-1, 1)


@dataclass(frozen=True, slots=True)
class Permutation:
    """The keyed permutation of range(n), for n up to 2^64."""

    n: int
    key: int

    def __post_init__(self) -> None:
        if not 0 <= self.n <= 1 << 64:
            raise ConfigError(f"a permutation has between 0 and 2^64 elements, not {self.n}")
        if not 0 <= self.key < 1 << 64:
            raise ConfigError(f"a permutation's key has 64 bits, and {self.key} does not fit")

    def __call__(self, index: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Where each index goes; int64, or uint64 where n needs it."""
        flat = index.astype(np.uint64).reshape(-1)  # a negative index wraps, past any n
        if len(flat) and int(flat.max()) >= self.n:
            worst = index.reshape(-1)[flat.argmax()]
            raise OutOfBounds(f"a permutation of range({self.n}) has no place for {worst}")
        out = permute(flat, max(self.n, 1), self.key).reshape(index.shape)
        return out if self.n > 1 << 63 else out.view(np.int64)


def permute(index: U64, n: int | npt.NDArray[Any], key: int | U64) -> U64:
    """`index[i]` under the permutation of range(n[i]) that `key[i]` names; 0 <= index < n.

    One call serves many permutations at once, so a thousand sources cost what one does.

    >>> keys = np.array([5, 5, 6], np.uint64)
    >>> permute(np.array([0, 1, 0], np.uint64), np.array([2, 2, 1]), keys).tolist()
    [0, 1, 0]
    """
    last = np.asarray(n - 1, np.uint64).reshape(-1)
    keys = np.asarray(key, np.uint64).reshape(-1)
    out = _once(index, last, keys)
    small = last < SMALL
    if small.any():
        which = np.flatnonzero(np.broadcast_to(small, out.shape))
        last, keys = _pick([last, keys], which)
        for turn in range(1, TURNS):
            out[which] = _once(out[which], last, subkeys(keys, np.array([ROUNDS + turn])))
    return out


def _once(index: U64, last: U64, key: U64) -> U64:
    """One Feistel permutation of 0 .. last."""
    shape = _shape(last)
    keys = list(subkeys(key, _ROUND_NUMBERS))  # (8, m)
    out = _rounds(index, shape, keys)
    outside = np.flatnonzero(out > last)
    while len(outside):
        out[outside] = _rounds(out[outside], _pick(shape, outside), _pick(keys, outside))
        (limit,) = _pick([last], outside)
        outside = outside[out[outside] > limit]
    return out


def _rounds(index: U64, shape: list[U64], keys: list[U64]) -> U64:
    rows, shift, mask = shape
    left, right = index >> shift, index & mask
    for r in range(0, ROUNDS, 2):
        left = left + ((_hash32(right, keys[r]) * rows) >> _S32)
        left = np.minimum(left, left - rows)  # modulo: below `rows` the difference wraps and loses
        right = (right + _hash32(left, keys[r + 1])) & mask
    return (left << shift) | right


def _hash32(x: U64, key: U64) -> U64:
    x = (x + key) * _HASH_1
    x ^= x >> _S32
    x *= _HASH_2
    x >>= _S32
    return x


def _shape(last: U64) -> list[U64]:
    """Rows, log2 of the columns, and the columns' mask of the grid that covers 0 .. last.

    >>> [x.tolist() for x in _shape(np.array([999, 0], np.uint64))]  # 10 bits: 32 rows of 32
    [[32, 1], [5, 0], [31, 0]]
    """
    shift = _bit_length(last) >> _ONE
    return [(last >> shift) + _ONE, shift, (_ONE << shift) - _ONE]


def _bit_length(x: U64) -> U64:
    """How many bits each needs; past 2^53 a float may round up, and one compare takes it back."""
    bits: U64 = np.minimum(np.frexp(x)[1], 64).astype(np.uint64)
    top = np.maximum(bits, _ONE) - _ONE
    bits -= (bits > 0) & (x >> top == 0)
    return bits


def _pick(arrays: list[U64], which: npt.NDArray[np.intp]) -> list[U64]:
    """The arrays at some of their places, where they do not hold one value for all."""
    return [a if len(a) == 1 else a[which] for a in arrays]
