"""Datasets of the Hugging Face Hub, or of directories that `datasets` reads.

`sources` finds a split's files · `cached` tokenizes them once · `dataset` cuts samples from that.
"""

from penstock.hub.cached import store_of
from penstock.hub.dataset import HuggingFaceDataset
from penstock.hub.sources import HubFiles, sources_of

__all__ = ["HubFiles", "HuggingFaceDataset", "sources_of", "store_of"]
