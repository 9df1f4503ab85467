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
from penstock.errors import StateMismatch
from penstock.hub.cached import documents_of
from penstock.hub.sources import COMMIT, HubFiles, sources_of
from penstock.order.identity import short
from penstock.stream import PassStream
from penstock.stream.passes import check_is_state
from penstock.stream.share import LANES
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
        self._asked, self._cache_dir = revision, cache_dir
        super().__init__(
            (),
            self.tokenizer_path,
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
        self._be_at(revision)

    @property
    def revision(self) -> str | None:
        """The commit that is read; None of a directory here."""
        return self.files.revision

    def _be_at(self, revision: str | None) -> None:
        """Find the split's files, at the commit that "main" is now or that `revision` names."""
        files = sources_of(self.dataset_name, self.dataset_config, self.split, revision=revision)
        self.paths = documents_of(files, self.text_field, self._cache_dir)
        self.files: HubFiles = files

    def _state(self) -> dict[str, Any]:
        return super()._state() | {"revision": self.revision}

    def _load(self, state: Mapping[str, Any]) -> None:
        before = self.paths, self.files, self._stream
        try:
            check_is_state(state)
            self._follow(state.get("revision"))
            super()._load(state)
        except BaseException:
            self.paths, self.files, self._stream = before
            raise

    def _follow(self, saved: Any) -> None:
        """Read the commit that a state was saved at; a directory is compared by its files."""
        if saved is None or self.revision is None or saved == self.revision:
            return
        if not isinstance(saved, str) or not COMMIT.fullmatch(saved):
            raise StateMismatch(
                f"this is not a state of a stream: revision is {short(saved)}, where a commit was "
                "expected"
            )
        if self._asked is not None and COMMIT.fullmatch(self._asked):
            raise StateMismatch(
                f"this state was saved at commit {saved[:12]}, and revision={self._asked[:12]!r} "
                "asks for another one: leave revision out, or begin anew"
            )
        self.close()
        self._be_at(saved)
        self._stream = None

    def _named(self) -> str:
        return self.files.title
