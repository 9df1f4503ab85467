"""Keys and hashes: the only source of randomness in Penstock.

A *key* is 64 bits made of everything that a random choice may depend on, by name:

    >>> hex(key_of("source", 42, "web"))
    '0xfea87698335a59ba'

Keys are hashed, never added: seed 1 of epoch 0 has nothing to do with seed 0 of epoch 1.
"""

from __future__ import annotations

import hashlib
from operator import index
from typing import Any

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31 = np.uint64(27), np.uint64(30), np.uint64(31)


def key_of(*parts: int | str) -> int:
    """A 64-bit key from a sequence of names and numbers.

    1 and "1" differ, and so do ("a", "bc") and ("ab", "c"); but NumPy's 1 is 1.

    >>> key_of("a", 1) == key_of("a", "1"), key_of("a", 1) == key_of("a", np.uint8(1))
    (False, True)
    """
    named = [("str", p) if isinstance(p, str) else ("int", str(index(p))) for p in parts]
    text = "".join(f"{kind}:{len(part)}:{part};" for kind, part in named)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def mix(x: U64) -> U64:
    """SplitMix64's finaliser: a bijection of 64 bits that leaves no bit where it was.

    >>> mix(np.array([0, 1], np.uint64)).tolist()
    [0, 6238072747940578789]
    """
    x = (x ^ (x >> _S30)) * _MIX_1
    x = (x ^ (x >> _S27)) * _MIX_2
    return x ^ (x >> _S31)


def subkeys(key: int | U64, number: npt.NDArray[Any]) -> U64:
    """The keys of numbered things (epochs, positions, rounds) under a key, elementwise.

    >>> subkeys(7, np.array([0, 1])).tolist() == subkeys(7, np.array([0, 1, 2])).tolist()[:2]
    True
    """
    base = np.asarray(key, np.uint64)
    return mix(base ^ mix((number.astype(np.uint64) + np.uint64(1)) * _GOLDEN))
