"""A dataset, an order and a position: batches that go on exactly where they stopped.

    loader = StatefulDataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset, seed=1))
    for batch in loader:                            # one epoch; the next `for` is the next epoch
        ...
        state = loader.state_dict()                 # means: this batch has been delivered

The position is the only thing that changes. Everything else is computed from it: which samples the
next batches hold (`order/`), what they are (`dataset/`), and which pages are read before they are
needed (`ahead`). `state` reads and writes checkpoints; `surgery` loads one onto a run that has
changed, and `edit` changes a run in its state; `fetch` serves datasets that give single items.
"""

from penstock.loader.core import StatefulDataLoader
from penstock.loader.edit import edit_state

__all__ = ["StatefulDataLoader", "edit_state"]
