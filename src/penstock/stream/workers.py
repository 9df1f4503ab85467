"""Which pass torch's worker processes are in, told among them through shared memory.

    >>> table = PassTable()
    >>> table.begin(worker=0, seed=7, least=0), table.begin(worker=1, seed=7, least=0)
    (0, 0)
    >>> table.begin(worker=1, seed=9, least=0), table.begin(worker=0, seed=9, least=0)
    (1, 1)

torch's loader makes workers anew for each `iter`, from the dataset in its own process, which hears
nothing of them. All workers of one `iter` have the same seed: the first of them takes the pass
after the latest one begun, whether or not that was read to its end, and the others take the same.
"""

from __future__ import annotations

from typing import Any

import torch

WORKERS = 1024
_SEED, _AGAIN, _PASS, _NEXT = range(4)


class PassTable:
    """A row for each worker: the seed of its `iter`, how often in a row that, and its pass."""

    def __init__(self) -> None:
        self._rows = torch.empty((WORKERS, 4), dtype=torch.int64)
        self.clear()
        self.__setstate__(self.__dict__)

    def clear(self) -> None:
        """Begin anew: no worker has begun a pass."""
        self._rows[:] = torch.tensor([-1, 0, 0, 0])

    @property
    def following(self) -> int:
        """The pass after the latest one that a worker began; 0 when none has."""
        return int(self._rows[:, _NEXT].max())

    def begin(self, *, worker: int, seed: int, least: int) -> int:
        """The pass that a worker begins, `least` or a later one."""
        # What others wrote is read in the opposite order: who sees a `next` sees its seed, too.
        following, rows, own = self.following, self._rows.clone(), self._rows[worker]
        seed = seed % (1 << 62)
        again = int(own[_AGAIN]) + 1 if own[_SEED] == seed else 0
        same = (rows[:, _SEED] == seed) & (rows[:, _AGAIN] == again)
        latest = same & (rows[:, _PASS] >= following - 1)  # not from before the others' last ones
        number = int(rows[latest][0, _PASS]) if latest.any() else max(least, following)
        for column, value in ((_PASS, number), (_AGAIN, again), (_SEED, seed)):
            own[column] = value
        own[_NEXT] = number + 1
        return number

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._rows.share_memory_()  # type: ignore[no-untyped-call]
