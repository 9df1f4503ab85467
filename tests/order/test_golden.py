"""Orders pinned for good: a run resumed with a later release meets the very same samples.

A digest here changes only together with ORDER_VERSION, and then old states are refused by name.
To change one knowingly: raise ORDER_VERSION, run this file, and copy the digests it prints.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import pytest

from penstock.order import ORDER_VERSION, EpochOrder, MixtureOrder, Permutation, Stage, quantise
from penstock.order.hashing import key_of, subkeys

COUNT = 10_000


def digest(numbers: npt.NDArray[np.int64]) -> str:
    """Sixteen hex digits of a list of numbers, the same on every machine."""
    return blake2b(numbers.astype("<i8").tobytes(), digest_size=8).hexdigest()


def test_the_version_is_the_one_these_digests_were_made_with() -> None:
    assert ORDER_VERSION == 1


@pytest.mark.parametrize(
    ("n", "seed", "epoch", "expected"),
    [
        (7, 0, 0, "5f116195f17234d3"),
        (255, 0, 0, "5649459b442fb11f"),
        (256, 0, 0, "3eebd0de8793bdc6"),
        (1000, 42, 5, "dd36af0ca12c14ef"),
        (2**16, 0, 0, "ca513d9da882eca5"),
        (2**16, 0, 1, "160e1640f7b63473"),
        (2**16, 1, 0, "eb49f48a68514f64"),
        (100_003, 42, 3, "ca3049e142ff382e"),
        (10**9, 42, 0, "4054be78cb81e64b"),
        (10**9, -1, 1000, "61460afd3c0fba64"),
        (2**40 + 7, 2**63, 10**6, "1948cf96a8f7ef77"),
    ],
)
def test_the_first_indices_of_an_epoch(n: int, seed: int, epoch: int, expected: str) -> None:
    assert digest(EpochOrder(n, seed).indices(epoch * n + np.arange(COUNT))) == expected


def mixture(sources: int, seed: int, *starts: int, shuffle: bool = True) -> MixtureOrder:
    """Sources of 1,000, 1,001, ... samples, with weights from 0 to 10 that each stage shifts."""
    stages = [
        Stage.of([float((i * 7 + s + 1) % 11) for i in range(sources)], start)
        for s, start in enumerate([0, *starts])
    ]
    sizes, names = [1000 + i for i in range(sources)], [f"source {i}" for i in range(sources)]
    return MixtureOrder(sizes, names, seed=seed, stages=stages, shuffle=shuffle)


@pytest.mark.parametrize(
    ("order", "position", "expected"),
    [
        (mixture(2, 0), 0, "2ba53546ffedcbd1"),
        (mixture(2, 1), 0, "3b81a96832cce9fe"),
        (mixture(2, 0, shuffle=False), 0, "79c1fdd6780cc188"),
        (mixture(10, 42), 10**13, "35cd71c114c1d9aa"),
        (mixture(10, 42, 5000, 7001), 0, "1d8833f1c9ed8c71"),
        (mixture(10, 42, 5000, 10**13), 10**13 - 5000, "8b97c0b5708f7cef"),
        (mixture(1000, 42, 4096), 0, "a525a32ac9ecec2a"),
    ],
)
def test_the_first_indices_of_a_mixture(order: MixtureOrder, position: int, expected: str) -> None:
    assert digest(order.indices(position + np.arange(COUNT))) == expected


def test_keys_permutations_and_weights() -> None:
    assert [hex(key_of(*parts)) for parts in [(), ("source", 42, "web"), (-1, "é")]] == [
        "0xb4b2797457a0a6e4",
        "0xfea87698335a59ba",
        "0xd7ed1cf341548777",
    ]
    assert [hex(key) for key in subkeys(2**64 - 1, np.array([0, 1, 2**63 - 1])).tolist()] == [
        "0xf2c27ef86a95b080",
        "0x9ce41992d31384f9",
        "0x9be5ffecee420119",
    ]
    assert Permutation(5, 2**64 - 1)(np.arange(5)).tolist() == [0, 4, 3, 1, 2]
    assert Permutation(2**64, 5)(np.array([0, 1, 2**64 - 1], np.uint64)).tolist() == [
        8871846778107957740,
        11831689053748157506,
        2150210353963762720,
    ]
    assert quantise([1, 1e-9, 0, 0.1, 1 / 3]) == (2996488809, 3, 0, 299648881, 998829603)
