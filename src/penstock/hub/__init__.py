"""Datasets of the Hugging Face Hub, or of directories that `datasets` reads.

`sources` finds a split's files · `cached` tokenizes them once · `dataset` cuts samples from that ·
`streaming` reads and tokenizes on the way.
"""

from penstock.hub.cached import store_of
from penstock.hub.dataset import HuggingFaceDataset
from penstock.hub.sources import HubFiles, sources_of
from penstock.hub.streaming import StreamingHuggingFaceDataset

__all__ = [
    "HubFiles",
    "HuggingFaceDataset",
    "StreamingHuggingFaceDataset",
    "sources_of",
    "store_of",
]
