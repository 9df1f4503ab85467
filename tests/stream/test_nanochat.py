"""nanochat's loaders: its rows, its state keys, and a state of ours that is exact."""

from __future__ import annotations

import json
import random
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tests.stream import nanochat_reference as reference
from tests.text.tokenizers_for_tests import gpt2_like

import penstock
from penstock.errors import ConfigError, DataError, MissingData, StateMismatch
from penstock.stream.encoding import _ragged
from penstock.stream.nanochat import (
    tokenizing_distributed_data_loader as flat,
)
from penstock.stream.nanochat import (
    tokenizing_distributed_data_loader_bos_bestfit as bestfit,
)
from penstock.stream.nanochat import (
    tokenizing_distributed_data_loader_with_state as flat_with_state,
)
from penstock.stream.nanochat import (
    tokenizing_distributed_data_loader_with_state_bos_bestfit as bestfit_with_state,
)
from penstock.stream.state import merge_states

BOS = 1


class Words:
    """A tokenizer of nanochat's shape: a token for each word, which is a number."""

    def __init__(self, kind: str = "list") -> None:
        self.kind = kind
        self.calls: list[int] = []

    def get_bos_token_id(self) -> int:
        return BOS

    def encode(self, texts: Any, prepend: int | None = None, num_threads: int = 8) -> Any:
        assert isinstance(texts, list)
        self.calls.append(len(texts))
        found = [[prepend, *map(int, text.split())] for text in texts]
        return [np.array(ids) for ids in found] if self.kind == "array" else found


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Five files of 3 to 7 row groups; each word occurs once; some documents are empty."""
    folder = tmp_path_factory.mktemp("base_data")
    numbers, chance = iter(range(2, 10**7)), random.Random(0)
    for k in range(5):
        texts = [
            " ".join(str(next(numbers)) for _ in range(int(chance.lognormvariate(2.5, 1.2))))
            for _ in range(20 * (k + 3) - k)
        ]
        table = pa.table({"text": texts})
        pq.write_table(table, folder / f"{k}.parquet", row_group_size=20)
    return sorted(folder.iterdir())


def options(files: list[Path], **more: Any) -> dict[str, Any]:
    return {"device": "cpu", "data_dir": files[0].parent, "rank": 0, "world_size": 1} | more


def same(ours: Any, theirs: Any) -> None:
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])


@pytest.mark.parametrize("kind", ["list", "array"])
@pytest.mark.parametrize(("rank", "world"), [(0, 1), (1, 2), (2, 3)])
def test_flat_rows_are_nanochats_token_for_token_and_so_are_its_state_keys(
    files: list[Path], kind: str, rank: int, world: int
) -> None:
    made = flat_with_state(
        Words(kind), 3, 16, "train", tokenizer_batch_size=7,
        **options(files, rank=rank, world_size=world),
    )  # fmt: skip
    wanted = reference.flat(Words(), 3, 16, files[:-1], rank=rank, world=world, size=7)
    for ours, theirs in islice(zip(made, wanted, strict=False), 200):
        same(ours, theirs)
        assert (ours[2]["pq_idx"], ours[2]["rg_idx"], ours[2]["epoch"]) == theirs[2]
    assert theirs[2][2] > 1, "over the end of an epoch"


@pytest.mark.parametrize("kind", ["list", "array"])
@pytest.mark.parametrize(("rank", "world"), [(0, 1), (1, 2), (2, 3)])
def test_best_fit_rows_are_nanochats_token_for_token_and_so_are_its_state_keys(
    files: list[Path], kind: str, rank: int, world: int
) -> None:
    made = bestfit_with_state(
        Words(kind), 3, 16, "train", tokenizer_batch_size=7, buffer_size=30,
        **options(files, rank=rank, world_size=world),
    )  # fmt: skip
    wanted = reference.best_fit(
        Words(), 3, 16, files[:-1], rank=rank, world=world, size=7, buffer_size=30
    )
    for ours, theirs in islice(zip(made, wanted, strict=False), 200):
        same(ours, theirs)
        assert (ours[2]["pq_idx"], ours[2]["rg_idx"], ours[2]["epoch"]) == theirs[2]
    assert theirs[2][2] > 1, "over the end of an epoch"


LOADERS = {
    "flat": (flat_with_state, reference.flat, {}),
    "best fit": (bestfit_with_state, reference.best_fit, {"buffer_size": 30}),
}


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("start", [(0, 0, 1), (1, 2, 1), (2, 4, 3), (3, 5, 2), (0, 2, 2)])
@pytest.mark.parametrize(("rank", "world"), [(0, 1), (1, 2)])
def test_a_state_of_only_nanochats_keys_goes_on_where_nanochat_would(
    files: list[Path], name: str, start: tuple[int, int, int], rank: int, world: int
) -> None:
    ours, theirs, more = LOADERS[name]
    state = dict(zip(("pq_idx", "rg_idx", "epoch"), start, strict=True))
    made = ours(
        Words(), 2, 16, "train", tokenizer_batch_size=7, resume_state_dict=state, **more,
        **options(files, rank=rank, world_size=world),
    )  # fmt: skip
    wanted = theirs(Words(), 2, 16, files[:-1], rank=rank, world=world, size=7, start=state, **more)
    for a, b in islice(zip(made, wanted, strict=False), 60):
        same(a, b)
        assert (a[2]["pq_idx"], a[2]["rg_idx"], a[2]["epoch"]) == b[2]


def test_a_resume_state_without_an_epoch_means_the_first(files: list[Path]) -> None:
    made = flat_with_state(
        Words(), 2, 16, "train", resume_state_dict={"pq_idx": 1, "rg_idx": 0}, **options(files)
    )
    assert next(made)[2]["epoch"] == 1


@pytest.mark.parametrize("name", LOADERS)
def test_our_own_state_skips_and_repeats_nothing_at_any_batch(files: list[Path], name: str) -> None:
    load, _, more = LOADERS[name]
    again = options(files, tokenizer_batch_size=7, **more)
    whole = list(islice(load(Words(), 2, 16, "train", **again), 120))
    for at in (0, 1, 17, 60, 99):
        state = json.loads(json.dumps(whole[at][2]))
        resumed = load(Words("array"), 2, 16, "train", resume_state_dict=state, **again)
        for ours, wanted in zip(resumed, whole[at + 1 : at + 21], strict=False):
            same(ours, wanted)
            assert ours[2] == wanted[2]


@pytest.mark.parametrize("packing", ["concat", "best_fit_crop", "chunked"])
def test_with_stated_lanes_a_state_goes_on_at_any_number_of_ranks(
    files: list[Path], packing: str
) -> None:
    load = bestfit_with_state if packing == "best_fit_crop" else flat_with_state
    more: dict[str, Any] = {
        "packing": packing,
        "tokenizer_batch_size": 7,
        "data_dir": files[0].parent,
    }
    if packing == "best_fit_crop":
        more["buffer_size"] = 10
    one = load(Words(), 1, 16, "train", device="cpu", rank=0, world_size=1, lanes=4, **more)
    rows = [next(one)[0] for _ in range(240)]
    chance, state, got = random.Random(1), None, 0
    while got < 220:
        world, size = chance.choice([1, 2, 4]), chance.choice([1, 3])
        ranks = [
            load(
                Words(), size, 16, "train", device="cpu", rank=r, world_size=world,
                resume_state_dict=state, **({"lanes": 4} if state is None else {}), **more,
            )
            for r in range(world)
        ]  # fmt: skip
        for _ in range(chance.randint(1, 5)):
            made = [next(loader) for loader in ranks]
            for k in range(size):
                for inputs, _, _ in made:
                    if got < len(rows):
                        assert torch.equal(inputs[k], rows[got][0])
                    got += 1
        state = json.loads(json.dumps(merge_states([each[2] for each in made])))


def test_chunked_crops_nothing_and_starves_no_long_document(files: list[Path]) -> None:
    made = bestfit_with_state(Words(), 4, 16, "train", packing="chunked", lanes=2, **options(files))
    documents: list[list[int]] = []
    for file in files[:-1]:
        documents += [[int(w) for w in t.split()] for t in pq.read_table(file)["text"].to_pylist()]
    seen: list[int] = []
    for inputs, targets, state in made:
        for row, target in zip(inputs.tolist(), targets.tolist(), strict=True):
            padding = target.index(-1) if -1 in target else len(target)
            seen += [row[0], *target[:padding]]
            assert target[padding:] == [-1] * (len(target) - padding)
        if state["epoch"] > 3:
            break
    counted = {word: seen.count(word) for word in random.Random(0).sample(sorted(set(seen)), 200)}
    everything = {word for document in documents for word in document}
    assert everything <= set(seen)
    assert set(counted.values()) <= {2, 3, 4}


def test_tensors_are_int64_contiguous_and_fresh_for_each_batch(files: list[Path]) -> None:
    for load in (flat, bestfit):
        batches = list(islice(load(Words(), 2, 16, "train", **options(files)), 3))
        for inputs, targets in batches:
            assert inputs.dtype == targets.dtype == torch.int64
            assert inputs.shape == targets.shape == (2, 16)
            assert inputs.is_contiguous()
        before = batches[0][0].clone()
        batches[1][0].fill_(0)
        assert torch.equal(batches[0][0], before)
        assert torch.equal(batches[0][0][:, 1:], batches[0][1][:, :-1])


def test_val_is_the_last_file(files: list[Path]) -> None:
    made = flat(Words(), 1, 16, "val", **options(files))
    wanted = reference.flat(Words(), 1, 16, files[-1:])
    for ours, theirs in islice(zip(made, wanted, strict=False), 20):
        same(ours, theirs)


def test_one_file_alone_has_no_train_split(files: list[Path], tmp_path: Path) -> None:
    (tmp_path / "only.parquet").write_bytes(files[0].read_bytes())
    with pytest.raises(MissingData, match="holds one file alone"):
        flat(Words(), 1, 16, "train", device="cpu", data_dir=tmp_path)
    assert next(flat(Words(), 1, 16, "val", device="cpu", data_dir=tmp_path))


def test_the_data_folder_comes_from_the_environment(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_DATA_DIR", str(files[0].parent))
    ours = next(penstock.tokenizing_distributed_data_loader(Words(), 2, 16, "train", device="cpu"))
    same(ours, next(flat(Words(), 2, 16, "train", **options(files))))
    monkeypatch.delenv("PENSTOCK_DATA_DIR")
    with pytest.raises(ConfigError, match="set PENSTOCK_DATA_DIR"):
        flat(Words(), 1, 16, "train", device="cpu")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"split": "test"}, "'train' or 'val'"),
        ({"B": 0}, "B is a whole number >= 1"),
        ({"T": 0}, "T is a whole number >= 1"),
        ({"world_size": 40, "rank": 39}, "row groups"),
        ({"lanes": 3, "world_size": 2}, "3 lanes cannot be dealt evenly to 2 ranks"),
        ({"packing": "bfd"}, "'concat' or 'chunked'"),
        ({"resume_state_dict": {"pq_idx": "a", "rg_idx": 0}}, "pq_idx is 'a'"),
    ],
)
def test_wrong_arguments_are_said_at_once(
    files: list[Path], wrong: dict[str, Any], message: str
) -> None:
    given = options(files) | {"B": 1, "T": 16, "split": "train"} | wrong
    with pytest.raises((ConfigError, StateMismatch), match=message):
        flat_with_state(Words(), **given)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_cuda_the_default_device_is_an_error_that_names_the_other(
    files: list[Path],
) -> None:
    with pytest.raises(ConfigError, match="device='cpu'"):
        flat(Words(), 1, 16, "train", data_dir=files[0].parent)


def test_a_state_of_other_settings_is_refused_by_name(files: list[Path]) -> None:
    _, _, state = next(flat_with_state(Words(), 1, 16, "train", **options(files)))
    with pytest.raises(StateMismatch, match="seq_len was 16 and is 32"):
        flat_with_state(Words(), 1, 32, "train", resume_state_dict=state, **options(files))
    with pytest.raises(StateMismatch, match="data"):
        flat_with_state(Words(), 1, 16, "val", resume_state_dict=state, **options(files))


def test_a_buffer_of_a_thousand_documents_is_a_small_state(files: list[Path]) -> None:
    made = bestfit_with_state(Words(), 8, 32, "train", **options(files))
    for _, _, state in islice(made, 20):
        assert len(json.dumps(state)) < 64 << 10


def test_penstocks_own_tokenizers_give_the_rows_of_their_ids_after_a_bos(files: list[Path]) -> None:
    tokenizer = penstock.open_tokenizer(gpt2_like(), backend="reference")

    class Same(Words):
        def get_bos_token_id(self) -> int:
            return tokenizer.eos_id  # as GPT-2's: one token parts documents

        def encode(self, texts: Any, prepend: int | None = None, num_threads: int = 8) -> Any:
            ids, ends = tokenizer.encode(texts)
            parts = [ids[a:b].tolist() for a, b in pairwise(ends)]
            return [[prepend, *part] for part in parts]

    given = options(files, buffer_size=20)
    own, shaped = (bestfit(each, 2, 32, "train", **given) for each in (tokenizer, Same()))
    for ours, theirs in islice(zip(own, shaped, strict=False), 40):
        same(ours, theirs)


@pytest.mark.parametrize("ids", [np.array([-1]), np.array([1.5]), np.array([1 << 32])])
def test_arrays_of_what_is_no_id_are_refused(ids: Any) -> None:
    with pytest.raises(DataError, match="an id that is none"):
        _ragged([np.array([3], ids.dtype), ids])


def test_arrays_without_an_id_beside_others_are_fine() -> None:
    ids, offsets = _ragged([np.array([]), np.array([3])])
    assert (ids.tolist(), offsets.tolist()) == ([3], [0, 0, 1])


def test_the_first_batch_waits_for_few_documents(tmp_path: Path) -> None:
    for number in range(2):
        texts = pa.table({"text": ["abc"] * 40})
        pq.write_table(texts, tmp_path / f"{number}.parquet", row_group_size=4)
    asked = []

    class Counting:
        def get_bos_token_id(self) -> int:
            return 1

        def encode(self, texts: list[str], prepend: int, num_threads: int) -> list[list[int]]:
            asked.append(len(texts))
            return [[prepend, 5, 6, 7] for _ in texts]

    next(flat_with_state(Counting(), 1, 8, "train", data_dir=tmp_path, device="cpu"))
    assert sum(asked) < 2000  # not GROUP tokens, which are thousands of passes over these
