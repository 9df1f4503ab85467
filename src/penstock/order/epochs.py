"""The order of a single dataset, or of one source of a mixture: a new permutation each epoch.

    >>> order = EpochOrder(5, seed=0)
    >>> sorted(order.indices(np.arange(5, 10)).tolist())
    [0, 1, 2, 3, 4]

Positions go on for ever, and so do epochs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError
from penstock.order.hashing import key_of, subkeys
from penstock.order.permutation import permute


@dataclass(frozen=True, slots=True)
class EpochOrder:
    """Position to sample over `n` samples: position = epoch * n + offset.

    With the name of a mixture's source, its positions are that source's ordinals.
    """

    n: int
    seed: int
    shuffle: bool = True
    name: str = "data"

    def indices(self, positions: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """The sample at each position."""
        if self.n == 0:
            raise ConfigError("a dataset without a single sample has no order")
        epoch, place = np.divmod(positions.astype(np.int64), self.n)
        if not self.shuffle:
            return place
        if len(epoch) and (epoch == epoch[0]).all():
            epoch = epoch[:1]  # one key for all is quicker
        keys = subkeys(key_of("source", self.seed, self.name), epoch)
        return permute(place.view(np.uint64), self.n, keys).view(np.int64)
