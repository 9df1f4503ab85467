"""Lightning over a Penstock loader, exact on resume.

    python examples/train_lightning.py tokens/ --steps 60 --output out/    # again: goes on

The module keeps the loader's state in its checkpoint. Each batch travels with the state that goes
on after it, so that what Lightning fetches ahead is never counted.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel

from penstock import DataConfig, StatefulDataLoader, build_dataloader


class Batches:
    """A loader as Lightning takes it, remembering the state after each batch it was given."""

    def __init__(self, loader: StatefulDataLoader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], str]]:
        """Batches, each with the state that goes on after it: however many are fetched ahead."""
        for batch in self.loader:
            yield batch, json.dumps(self.loader.state_dict())


class Module(lightning.LightningModule):
    """A small GPT; its checkpoint says where the data goes on."""

    def __init__(self, loader: StatefulDataLoader) -> None:
        super().__init__()
        self.model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=64, n_positions=64))
        self.loader, self.trained = loader, json.dumps(loader.state_dict())

    def train_dataloader(self) -> Batches:
        """This rank's batches: Lightning has no sampler to put in."""
        return Batches(self.loader)

    def training_step(self, given: tuple[dict[str, torch.Tensor], str], number: int) -> Any:
        """The loss of one batch."""
        batch, self.trained = given
        digest = hashlib.blake2b(batch["input_ids"].cpu().numpy().tobytes(), digest_size=8)
        print(f"step {self.global_step + 1} batch {digest.hexdigest()}", flush=True)
        logits = self.model(input_ids=batch["input_ids"]).logits
        return cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Where the data goes on."""
        checkpoint["penstock"] = self.trained

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Go on there."""
        self.loader.load_state_dict(json.loads(checkpoint["penstock"]))


def main() -> None:
    """Train, or go on."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", help="a store, or a folder of tokens")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()

    lightning.seed_everything(0, verbose=False)
    config = DataConfig(dataset_path=options.data, num_workers=0)
    loader = build_dataloader(config, batch_size=4, seq_len=64, seed=1)
    keep = ModelCheckpoint(options.output, every_n_train_steps=5, save_top_k=1, filename="last")
    trainer = lightning.Trainer(
        max_steps=options.steps,
        max_epochs=-1,
        callbacks=[keep],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    last = options.output / "last.ckpt"
    trainer.fit(Module(loader), ckpt_path=last if last.exists() else None)


if __name__ == "__main__":
    main()
