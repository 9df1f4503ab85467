"""Text to batches with no store between: units, lanes, and the addresses to go on from.

`corpus` cuts files into units · `deal` says which unit a lane reads next · `reading`, `encoding`
and `feed` make blocks of tokenized documents, in the threads of `ahead` · `chunks` packs ·
`lanes` give rows and know their address · `share` is a rank's lanes · `state` joins ranks ·
`text_stream` and `nanochat` are what people use · `index` counts an epoch, `counts` keeps it.
"""

from penstock.stream.counts import Counts
from penstock.stream.index import count
from penstock.stream.nanochat import (
    tokenizing_distributed_data_loader,
    tokenizing_distributed_data_loader_bos_bestfit,
    tokenizing_distributed_data_loader_with_state,
    tokenizing_distributed_data_loader_with_state_bos_bestfit,
)
from penstock.stream.passes import PassStream
from penstock.stream.state import merge_states
from penstock.stream.text_stream import TextStream

__all__ = [
    "Counts",
    "PassStream",
    "TextStream",
    "count",
    "merge_states",
    "tokenizing_distributed_data_loader",
    "tokenizing_distributed_data_loader_bos_bestfit",
    "tokenizing_distributed_data_loader_with_state",
    "tokenizing_distributed_data_loader_with_state_bos_bestfit",
]
