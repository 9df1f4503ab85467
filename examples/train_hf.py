"""Hugging Face's Trainer over a Penstock loader, exact on resume.

    python examples/train_hf.py tokens/ --steps 60 --output out/       # again: goes on

The loader's state is saved beside each of Trainer's checkpoints. Its labels are shifted already, so
the loss takes them as they are; Trainer's own skipping of batches is turned off.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint

from penstock import DataConfig, StatefulDataLoader, build_dataloader

STATE = "penstock.json"


class PenstockTrainer(Trainer):
    """Trainer with batches and labels of a Penstock loader."""

    def __init__(self, *args: Any, loader: StatefulDataLoader, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.loader = loader
        self.add_callback(SaveLoader(loader))

    def get_train_dataloader(self) -> Any:
        """The loader itself: it deals its batches to ranks and devices already."""
        return self.loader

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, **_: Any
    ) -> Any:
        """Cross entropy with labels as they are; a model's own loss would shift them again."""
        digest = hashlib.blake2b(inputs["input_ids"].cpu().numpy().tobytes(), digest_size=8)
        print(f"step {self.state.global_step + 1} batch {digest.hexdigest()}", flush=True)
        outputs = model(input_ids=inputs["input_ids"])
        loss = cross_entropy(outputs.logits.flatten(0, 1), inputs["labels"].flatten())
        return (loss, outputs) if return_outputs else loss


class SaveLoader(TrainerCallback):
    """Keeps the loader's state in each checkpoint."""

    def __init__(self, loader: StatefulDataLoader) -> None:
        self.loader = loader

    def on_save(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        """Beside weights and optimizer."""
        place = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
        (place / STATE).write_text(json.dumps(self.loader.state_dict()))


def main() -> None:
    """Train, or go on."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", help="a store, or a folder of tokens")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=64, n_positions=64))
    config = DataConfig(dataset_path=options.data, num_workers=0)
    loader = build_dataloader(config, batch_size=4, seq_len=64, seed=1)
    last = get_last_checkpoint(str(options.output)) if options.output.is_dir() else None
    if last is not None:
        loader.load_state_dict(json.loads((Path(last) / STATE).read_text()))
    arguments = TrainingArguments(
        str(options.output),
        max_steps=options.steps,
        save_steps=5,
        ignore_data_skip=True,
        accelerator_config={"dispatch_batches": False, "even_batches": False},
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
        disable_tqdm=True,
        logging_steps=10,
    )
    trainer = PenstockTrainer(model, arguments, loader=loader)
    trainer.train(resume_from_checkpoint=last)


if __name__ == "__main__":
    main()
