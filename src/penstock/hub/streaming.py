"""A dataset of the Hub, or of a directory here, read and tokenized on the way.

dataset = StreamingHuggingFaceDataset("allenai/c4", "train", "text", 2048, "gpt2",
                                      dataset_config="en", rank=rank, world_size=world_size)
loader = StatefulDataLoader(dataset, 8)
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from penstock.checks import at_least
from penstock.errors import ConfigError, StateMismatch
from penstock.hub.cached import documents_of
from penstock.hub.sources import sources_of
from penstock.stream import PassStream
from penstock.stream.share import LANES
from penstock.text import open_tokenizer
from penstock.text.documents import Policy


class StreamingHuggingFaceDataset(PassStream):
    """Rows of a split's documents, EOS after each, those without a token left out.

    An `iter` is one pass over this rank's documents, and the next one has another order. Ranks may
    end a pass a few batches apart, so train by steps: an epoch's end is no place to synchronise.
    A rank reads the row groups of its own lanes only.

    Documents are shuffled over the whole split without a buffer, units and the documents in them
    by index; a `shuffle_buffer_size` of 0 or 1 leaves them in order. The state pins the dataset's
    commit: a run that is gone on with reads that, whatever was pushed since.
    """

    def __init__(
        self,
        dataset_name: str | os.PathLike[str],
        split: str,
        text_field: str,
        seq_len: int,
        tokenizer_path: str | os.PathLike[str],
        dataset_config: str | None = None,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 42,
        shuffle_buffer_size: int = 10000,
        pack_sequences: bool = False,
        *,
        revision: str | None = None,
        lanes: int = LANES,
        threads: int | None = None,
        policy: Policy = "error",
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        self.dataset_name, self.dataset_config = os.fspath(dataset_name), dataset_config
        self.split, self.text_field = split, text_field
        self.tokenizer_path = os.fspath(tokenizer_path)
        self.shuffle_buffer_size = at_least(0, shuffle_buffer_size, "shuffle_buffer_size")
        self.revision, self._cache_dir = revision, cache_dir
        super().__init__(
            (),
            None,
            seq_len,
            text_field=text_field,
            lanes=lanes,
            rank=rank,
            world_size=world_size,
            seed=seed,
            shuffle=self.shuffle_buffer_size > 1,
            pack_sequences=pack_sequences,
            policy=policy,
            threads=threads,
        )

    def files(self) -> list[str]:
        """The split's files, at the commit that is "main" now or that `revision` names."""
        files = sources_of(
            self.dataset_name, self.dataset_config, self.split, revision=self.revision
        )
        self.revision = files.revision
        return documents_of(files, self.text_field, self._cache_dir)

    def tokenizer(self) -> Any:
        """The tokenizer, which has to have an EOS."""
        opened = open_tokenizer(self.tokenizer_path)
        if opened.eos_id is None:
            raise ConfigError(
                f"{self.tokenizer_path} names no eos_token, and documents have to end with one: "
                "add it to its tokenizer_config.json"
            )
        return opened

    def state_dict(self) -> dict[str, Any]:
        """`epoch`, `rank_docs_consumed`, the addresses of this rank's lanes, and the `revision`."""
        state = super().state_dict()
        return state | {"revision": self.revision}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the row at which `state` was taken, at any number of ranks."""
        saved = state.get("revision")
        if saved is not None and not isinstance(saved, str):
            raise StateMismatch(
                f"this is not a state of a stream: revision is {saved!r}, where a commit was "
                "expected"
            )
        if saved is not None and saved != self.revision:
            self.close()
            self.revision, self._stream = saved, None
        super().load_state_dict(state)
