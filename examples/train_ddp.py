"""Training under torchrun, its checkpoint through torch.distributed.checkpoint.

    torchrun --nproc-per-node 2 examples/train_ddp.py tokens/ --steps 100 --checkpoint ckpt/

Kill it at any moment and start it again, with another number of processes if you like: it goes on
after the last checkpoint, with the very batches that would have come. A step is 8 sequences in all,
however many processes share them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from penstock import DataConfig, StatefulDataLoader, build_dataloader

GLOBAL_BATCH, SEQ_LEN, VOCABULARY = 8, 64, 50_304


class TinyGPT(nn.Module):
    """Two layers, for the sake of having some gradient."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Logits of the next token."""
        mask = nn.Transformer.generate_square_subsequent_mask(input_ids.shape[1])
        hidden = self.layers(self.embedding(input_ids), mask, is_causal=True)
        return hidden @ self.embedding.weight.T


class Training:
    """What a checkpoint holds, as torch.distributed.checkpoint's `Stateful` protocol has it."""

    def __init__(self, model: nn.Module, optimizer: Any, loader: StatefulDataLoader) -> None:
        self.model, self.optimizer, self.loader = model, optimizer, loader

    def state_dict(self) -> dict[str, Any]:
        """Weights, the optimizer's state, and the loader's as one line of JSON."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        data = json.dumps(self.loader.state_dict())
        return {"model": model, "optimizer": optimizer, "data": data}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put all three back."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.loader.load_state_dict(json.loads(state["data"]))


def batches(loader: StatefulDataLoader) -> Any:
    """Epoch after epoch."""
    while True:
        yield from loader


def main() -> None:
    """Train, and say what each step saw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", help="a store, or a folder of tokens")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    options = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(TinyGPT())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = DataConfig(dataset_path=options.data, num_workers=0)
    loader = build_dataloader(
        config, batch_size=GLOBAL_BATCH // world, seq_len=SEQ_LEN, seed=1
    )  # rank and world size come from torch.distributed
    training = Training(model, optimizer, loader)

    kept = sorted(options.checkpoint.glob("step-*/.metadata"))  # written last: the whole ones
    if kept:
        dcp.load({"training": training}, checkpoint_id=kept[-1].parent)
    for batch in batches(loader):
        loss = cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step = loader.step
        dist.all_reduce(loss, dist.ReduceOp.SUM)
        print_step(step, batch["input_ids"], loss.item() / world, rank, world)
        if step % options.every == 0 or step == options.steps:
            place = options.checkpoint / f"step-{step:06d}"
            dcp.save({"training": training}, checkpoint_id=place)
        if step == options.steps:
            break
    dist.destroy_process_group()


def print_step(step: int, inputs: torch.Tensor, loss: float, rank: int, world: int) -> None:
    """The global batch's digest and the loss: the same line for any number of processes."""
    parts = [torch.empty_like(inputs) for _ in range(world)]
    dist.all_gather(parts, inputs)
    rows = torch.stack(parts, 1).flatten(0, 1)  # rank r has rows r, r + world, ...
    if rank == 0:
        digest = hashlib.blake2b(rows.numpy().tobytes(), digest_size=8).hexdigest()
        print(f"step {step} batch {digest} loss {loss:.4f}", flush=True)


if __name__ == "__main__":
    main()
