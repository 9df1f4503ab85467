"""A dataset of the Hub, or of a directory here, as samples: tokenized once, then memory-mapped.

dataset = HuggingFaceDataset("allenai/c4", "train", "text", 2048, "gpt2", dataset_config="en")
loader = StatefulDataLoader(dataset, 8, DistributedSampler(dataset))
"""

from __future__ import annotations

import operator
import os
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.dataset.tokens import TOKENS
from penstock.dataset.windows import TokenWindows
from penstock.errors import ConfigError
from penstock.hub.cached import store_of
from penstock.hub.sources import sources_of
from penstock.store import open_store
from penstock.text.documents import Policy


class HuggingFaceDataset(TokenWindows):
    """All documents of a split as one stream of tokens, cut into `seq_len` inputs and labels.

    EOS follows each document; those without a token are left out. Sample i is the tokens
    [i * (seq_len + 1), (i + 1) * (seq_len + 1)) of the stream, and what is left at its end is not
    used. With `pack_sequences` labels across documents are -100, and `doc_ids` counts documents
    from 0 in each sample.

    The first process to come tokenizes the split, in `workers` processes, into a store below
    `cache_dir`; others wait for it, and later runs map it. Without a `revision`, a dataset of the
    Hub is taken as it is now. `policy` "reject" leaves out documents that have no text, up to one
    in a hundred.
    """

    def __init__(
        self,
        dataset_name: str | os.PathLike[str],
        split: str,
        text_field: str,
        seq_len: int,
        tokenizer_path: str | os.PathLike[str],
        dataset_config: str | None = None,
        pack_sequences: bool = False,
        *,
        revision: str | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        workers: int | None = None,
        backend: str = "auto",
        policy: Policy = "error",
    ) -> None:
        self.seq_len, self.text_field = operator.index(seq_len), text_field
        if self.seq_len < 1:
            raise ConfigError(f"seq_len must be at least 1, not {seq_len}")
        self.files = sources_of(os.fspath(dataset_name), dataset_config, split, revision=revision)
        path = store_of(
            self.files,
            text_field,
            tokenizer_path,
            cache_dir=cache_dir,
            workers=workers,
            backend=backend,
            policy=policy,
        )
        width = self.seq_len + 1
        super().__init__(open_store(path), width, width, pack_sequences, None)
        self._samples = self.store.total(TOKENS) // width
        self._sample_idx = 0
        if not self._samples:
            raise ConfigError(
                f"{self.files.title} has no sample of {seq_len} inputs and labels: its "
                f"{self.store.total(TOKENS):,} tokens are too few"
            )

    def __len__(self) -> int:
        return self._samples

    def _starts(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return indices * self.width

    def state_dict(self) -> dict[str, Any]:
        """Keys: `epoch`, `sample_idx`, `total_sequences`. Where a run is, the loader knows."""
        return {
            "epoch": self._epoch,
            "sample_idx": self._sample_idx,
            "total_sequences": len(self),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `epoch` and `sample_idx`; the number of sequences follows from the data."""
        super().load_state_dict(state)
        self._sample_idx = int(state.get("sample_idx", 0))
