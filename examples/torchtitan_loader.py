"""Penstock as torchtitan's dataloader: the interface that its trainer asks for.

    config.dataloader = PenstockLoader.Config(run="run.toml")      # [data] of a TOML file

torchtitan builds a dataloader with the data-parallel rank and world size of its mesh, takes
(inputs by name, labels) from it for ever, and saves its state through torch.distributed.checkpoint.
The state is the same on every rank, and goes on at any world size.

With torchtitan installed, give the class its `BaseDataLoader` as a second base.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.stateful import Stateful

from penstock import build_dataloader

if TYPE_CHECKING:
    import torch


class PenstockLoader(Stateful):
    """Batches of a TOML file's [data] for one data-parallel rank."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        """What stands in the trainer's config."""

        run: str
        seed: int = 0

        def build(self, **options: Any) -> PenstockLoader:
            """The loader, from what only the trainer knows."""
            return PenstockLoader(self, **options)

    def __init__(
        self,
        config: Config,
        *,
        dp_rank: int,
        dp_world_size: int,
        seq_len: int,
        local_batch_size: int,
        **_: Any,
    ) -> None:
        self.loader = build_dataloader(
            config.run,
            batch_size=local_batch_size,
            seq_len=seq_len,
            seed=config.seed,
            rank=dp_rank,
            world_size=dp_world_size,
        )

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Epoch after epoch, from wherever the state says."""
        while True:
            for batch in self.loader:
                inputs = {"input": batch["input_ids"]}
                if "position_ids" in batch:  # of packed rows: attention masks follow from them
                    inputs["positions"] = batch["position_ids"]
                yield inputs, batch["labels"]

    def state_dict(self) -> dict[str, Any]:
        """One line of JSON, since checkpoints flatten what has structure."""
        return {"penstock": json.dumps(self.loader.state_dict())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on there; a fresh start where there is nothing."""
        if state_dict:
            self.loader.load_state_dict(json.loads(state_dict["penstock"]))
