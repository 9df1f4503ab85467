"""A run gives the same bytes however it is done, loses nothing unsaid, and ends clearly."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from tests.text.tokenizers_for_tests import (
    gpt2_like,
    llama3_like,
    qwen_like,
    stdlib_texts,
    unigram_like,
)

from penstock import ConfigError, DataError, PenstockError, open_store, verify
from penstock.cli import main
from penstock.prepare import Pipeline, PipelineConfig, plan, preparation, recipe
from penstock.prepare.tally import Progress
from penstock.store import source_of
from penstock.text.documents import read_at
from penstock.text.files import find_files
from penstock.text.tokenizer import FileTokenizer, open_tokenizer

ROOT = Path(__file__).parents[2]


def texts(count: int = 60) -> list[str]:
    """Documents of different sizes, some of them the same."""
    whole = "\n".join(stdlib_texts())
    luck = random.Random(0)
    found = []
    for _ in range(count):
        at = luck.randrange(len(whole) - 5000)
        found.append(whole[at : at + luck.choice([60, 200, 900, 4000])])
    return found


def write_jsonl(path: Path, documents: Sequence[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [d if isinstance(d, str) else json.dumps(d) for d in documents]
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three JSONL files and a Parquet one of several row groups."""
    folder = tmp_path_factory.mktemp("corpus")
    found = texts()
    for number in range(3):
        part = found[number * 15 : (number + 1) * 15]
        write_jsonl(
            folder / f"{number}.jsonl",
            [{"id": f"{number}-{i}", "text": t} for i, t in enumerate(part)],
        )
    table = pa.table({"text": found[45:]})
    pq.write_table(table, folder / "3.parquet", row_group_size=4)
    return folder


@pytest.fixture
def small_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """Works of a few documents, so that there are many."""
    real = plan.works_of
    monkeypatch.setattr(preparation, "works_of", lambda files: real(files, 8_000))


def prepare(inputs: Any, out: Path, config: PipelineConfig | None = None, **options: Any) -> Any:
    options.setdefault("workers", 0)
    return Pipeline(config or recipe("pretrain"), inputs, out, gpt2_like(), **options)


def tree(out: Path) -> dict[str, str]:
    """Every file of a store with a digest of it, what `prepare` keeps for itself left out."""
    return {
        str(path.relative_to(out)): blake2b(path.read_bytes()).hexdigest()
        for path in sorted(out.rglob("*"))
        if path.is_file() and ".prepare" not in path.parts
    }


# ------------------------------------------------------------------------------------ the bytes


def test_documents_come_out_in_order_with_eos_and_can_be_read_again_where_they_stood(
    corpus: Path, tmp_path: Path
) -> None:
    tally = prepare(corpus, tmp_path / "out").run()
    store, tokenizer = open_store(tmp_path / "out"), open_tokenizer(gpt2_like())
    documents = texts()
    assert tally.documents == tally.kept == store.documents == len(documents)
    files = {file.path: file for file in find_files([corpus])}
    for number, text in enumerate(documents):
        ids, _ = tokenizer.encode([text])
        assert store.record(number, "sequence").tolist() == [*ids.tolist(), tokenizer.eos_id]
        found = source_of(tmp_path / "out", number)
        assert found is not None
        assert read_at(files[found["file"]], found["address"])["text"] == text
        if number < 45:
            assert found["id"] == f"{number // 15}-{number % 15}"
    assert store.eos_token_id == tokenizer.eos_id
    assert store.metadata["tokenizer"] == tokenizer.content_hash
    assert verify(tmp_path / "out").ok
    assert (tmp_path / "out" / "__default__" / "shard_0000" / "meta.json").exists()


@pytest.mark.parametrize("storage", ["bin", "h5"])
def test_any_number_of_workers_gives_the_same_bytes(
    corpus: Path, tmp_path: Path, small_works: None, storage: str
) -> None:
    plain = recipe("pretrain").to_dict()
    plain["output"]["storage_format"] = storage
    config = PipelineConfig.from_dict(plain)
    trees = []
    for workers in (0, 1, 3):
        out = tmp_path / str(workers)
        prepare(corpus, out, config, workers=workers).run()
        trees.append(tree(out))
    assert trees[0] == trees[1] == trees[2]
    assert len(trees[0]) > 8  # several shards


def test_a_second_run_does_nothing(corpus: Path, tmp_path: Path, monkeypatch: Any) -> None:
    first = prepare(corpus, tmp_path / "out").run()
    before = {p: p.stat().st_mtime_ns for p in sorted((tmp_path / "out").rglob("*"))}
    monkeypatch.setattr(preparation, "works_of", None)
    assert prepare(corpus, tmp_path / "out").run() == first
    after = {p: p.stat().st_mtime_ns for p in sorted((tmp_path / "out").rglob("*"))}
    assert before == after


PANDAS = """
import sys
asked = []

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "pandas":
            asked.append(name)

sys.meta_path.insert(0, Finder())
from penstock.prepare import Pipeline, recipe
assert not {"numpy", "pyarrow"} & set(sys.modules)  # workers start before these are imported
corpus, out, tokenizer = sys.argv[1:]
Pipeline(recipe("pretrain"), corpus, out, tokenizer, workers=0).run()
print(len(asked), "jinja2" in sys.modules)
"""


def test_plain_text_asks_neither_for_pandas_nor_for_templates(corpus: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PANDAS, str(corpus), str(tmp_path / "out"), str(gpt2_like())]
    ran = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    assert ran.stdout.split() == ["0", "False"]


RUN = """
import sys
from penstock.prepare import Pipeline, plan, preparation, recipe
real = plan.works_of
preparation.works_of = lambda files: real(files, 8_000)
if __name__ == "__main__":
    corpus, out, tokenizer, workers = sys.argv[1:]
    Pipeline(recipe("pretrain"), corpus, out, tokenizer, workers=int(workers)).run()
"""


def killed_again_and_again(corpus: Path, root: Path, kills: int, seed: int) -> None:
    script = root / "run.py"
    script.write_text(RUN)
    whole, out = root / "whole", root / "out"
    command = [sys.executable, str(script), str(corpus)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def start(out: Path, workers: int) -> subprocess.Popen[bytes]:
        arguments = [*command, str(out), str(gpt2_like()), str(workers)]
        return subprocess.Popen(arguments, cwd=ROOT, env=environment, start_new_session=True)

    began = time.monotonic()
    assert start(whole, 0).wait() == 0
    usual = time.monotonic() - began
    luck = random.Random(seed)
    for _ in range(kills):
        workers = luck.choice([0, 1, 2])
        process = start(out, workers)
        time.sleep(luck.uniform(0.2, 1.3) * usual)
        if luck.random() < 0.5:
            process.kill()  # the parent alone: its workers have to end by themselves
        else:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if (out / "manifest.json").exists():
            assert verify(out).ok
        elif any(out.glob("*/shard_*")):
            with pytest.raises(PenstockError):
                open_store(out)
    assert start(out, 2).wait() == 0
    assert tree(out) == tree(whole), f"seed {seed}"
    assert not list((out / ".prepare").glob("parts/*"))


def test_runs_killed_at_random_moments_end_with_the_bytes_of_one_that_was_not(
    corpus: Path, tmp_path: Path
) -> None:
    killed_again_and_again(corpus, tmp_path, kills=4, seed=int(time.time()))


@pytest.mark.long
def test_thirty_kills_are_no_different(corpus: Path, tmp_path: Path) -> None:
    killed_again_and_again(corpus, tmp_path, kills=30, seed=int(time.time()))


@pytest.mark.parametrize("stop", range(1, 12, 3))
def test_a_run_that_ends_between_any_two_steps_is_taken_up(
    corpus: Path, tmp_path: Path, small_works: None, monkeypatch: Any, stop: int
) -> None:
    """Stopped after each completion mark, and in the middle of renaming the parts."""
    prepare(corpus, tmp_path / "whole").run()

    class Stop(Exception):
        pass

    def stopping(real: Any, after: int) -> Any:
        calls = iter(range(10**6))

        def run(*arguments: Any) -> Any:
            if next(calls) == after:
                raise Stop
            return real(*arguments)

        return run

    for name, owner in (("mark", plan.Folder), ("move", preparation)):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, stopping(getattr(owner, name), stop))
            with pytest.raises(Stop):
                prepare(corpus, tmp_path / "out").run()
        with pytest.raises(PenstockError):
            open_store(tmp_path / "out")
    prepare(corpus, tmp_path / "out").run()
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_fast_backend_that_turns_out_to_differ_leaves_nothing_behind(
    corpus: Path, tmp_path: Path, small_works: None, monkeypatch: Any, workers: int
) -> None:
    """Works are begun before the comparison has ended; here it ends late, and badly."""
    prepare(corpus, tmp_path / "reference", backend="reference").run()
    marked = []
    real = plan.Folder.mark

    def late(*_: Any) -> None:
        time.sleep(1)
        raise ConfigError("gigatoken and tokenizers give different ids for 'x'")

    monkeypatch.setattr(FileTokenizer, "check_fast", late)
    monkeypatch.setattr(plan.Folder, "mark", lambda *a: marked.append(time.time()) or real(*a))
    began = time.time()
    with pytest.warns(UserWarning, match="read by the slower backend: gigatoken and tokenizers"):
        prepare(corpus, tmp_path / "out", workers=workers).run()
    assert min(marked) - began > 1
    assert tree(tmp_path / "out") == tree(tmp_path / "reference")
    with pytest.raises(ConfigError, match="different ids"):
        prepare(corpus, tmp_path / "fast", workers=workers, backend="fast").run()
    assert not (tmp_path / "fast" / "manifest.json").exists()


def test_a_tokenizer_that_only_the_reference_knows_is_read_by_it(
    corpus: Path, tmp_path: Path
) -> None:
    with pytest.warns(UserWarning, match="read by the slower backend"):
        Pipeline(recipe("pretrain"), corpus, tmp_path / "out", unigram_like(), workers=1).run()
    assert open_store(tmp_path / "out").documents == 60


# ------------------------------------------------------------------------------ what is refused


def test_other_input_recipe_or_tokenizer_is_noticed_and_named(corpus: Path, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in" / "a.jsonl", [{"text": t} for t in texts(9)])
    out = tmp_path / "out"
    prepare(source.parent, out).run()
    before = tree(out)
    write_jsonl(source.parent / "b.jsonl", [{"text": "more " * 20}])
    with pytest.raises(ConfigError, match=r"b\.jsonl \(new\).*--overwrite"):
        prepare(source.parent, out).run()
    (source.parent / "b.jsonl").unlink()
    with pytest.raises(ConfigError, match="recipe"):
        prepare(source.parent, out, PipelineConfig.from_dict(with_items(3))).run()
    with pytest.raises(ConfigError, match="tokenizer"):
        Pipeline(recipe("pretrain"), source.parent, out, qwen_like(), workers=0).run()
    assert tree(out) == before
    os.utime(source, ns=(1, 1))
    with pytest.raises(ConfigError, match=r"a\.jsonl \(changed\)"):
        prepare(source.parent, out).run()
    write_jsonl(source, [{"text": t} for t in texts(5)])
    assert prepare(source.parent, out, overwrite=True).run().kept == 5
    assert open_store(out).documents == 5


def with_items(most: int) -> dict[str, Any]:
    plain = recipe("pretrain").to_dict()
    plain["preprocessing"]["max_items"] = most
    return plain


def test_a_store_that_something_else_wrote_is_left_alone(corpus: Path, tmp_path: Path) -> None:
    from penstock import ShardWriter

    with ShardWriter(tmp_path / "out", {"sequence": "uint16"}) as writer:
        writer.append({"sequence": [1, 2]})
    with pytest.raises(ConfigError, match="that were not prepared here"):
        prepare(corpus, tmp_path / "out").run()
    assert open_store(tmp_path / "out").documents == 1


def test_a_second_run_at_the_same_time_is_told_so(corpus: Path, tmp_path: Path) -> None:
    said = "another `penstock prepare` is writing"
    with plan.Folder(tmp_path / "out").locked(), pytest.raises(ConfigError, match=said):
        prepare(corpus, tmp_path / "out").run()
    prepare(corpus, tmp_path / "out").run()


@pytest.mark.parametrize(
    "options", [{"policy": "skip"}, {"max_rejects": 2}, {"workers": -1}], ids=str
)
def test_settings_that_cannot_be_meant_are_refused(
    corpus: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        prepare(corpus, tmp_path / "out", **options)


# ---------------------------------------------------------------------------------- bad documents


BAD = ['{"text": "cut', '{"text": 5}', '{"other": "x"}', '{"text": "\\ud800"}', '["text"]']


def test_the_first_bad_document_stops_the_run_by_file_and_line(tmp_path: Path) -> None:
    good = [{"text": t} for t in texts(3)]
    for number, bad in enumerate(BAD):
        source = write_jsonl(tmp_path / str(number) / "a.jsonl", [*good, bad, *good])
        with pytest.raises(DataError, match=r"a\.jsonl.*line 4"):
            prepare(source, tmp_path / "out").run()
        assert not (tmp_path / "out" / "manifest.json").exists()
        with pytest.raises(DataError, match=r"a\.jsonl.*line 4"):
            prepare(source, tmp_path / f"out{number}", workers=1).run()


def test_rejects_are_counted_and_written_with_their_reasons(
    tmp_path: Path, small_works: None
) -> None:
    good = [{"text": t} for t in texts(30)]
    source = write_jsonl(tmp_path / "a.jsonl", [*good[:10], *BAD, *good[10:]])
    ledgers = []
    for workers in (0, 2):
        out = tmp_path / f"out{workers}"
        tally = prepare(source, out, policy="reject", max_rejects=0.5, workers=workers).run()
        assert (tally.documents, tally.kept, tally.rejects) == (35, 30, 5)
        assert tally.balanced
        assert "no field 'text'" in tally.rejected
        lines = (out / "rejects.jsonl").read_text().splitlines()
        rejects = [json.loads(line) for line in lines]
        assert len(rejects) == 5
        assert all(each["reason"] and each["file"].endswith("a.jsonl") for each in rejects)
        raw = source.read_bytes()
        assert [raw[r["address"] :].split(b"\n")[0].decode() for r in rejects] == BAD
        ledgers.append(open_store(out).metadata["ledger"])
    assert ledgers[0] == ledgers[1] == tally.to_dict()
    assert tree(tmp_path / "out0") == tree(tmp_path / "out2")


def test_more_rejects_than_were_allowed_stop_the_run(tmp_path: Path) -> None:
    good = [{"text": t} for t in texts(30)]
    source = write_jsonl(tmp_path / "a.jsonl", [*good, *BAD])
    with pytest.raises(DataError, match=r"5 of 35 documents were rejected.*max_rejects"):
        prepare(source, tmp_path / "out", policy="reject", max_rejects=0.1).run()
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_documents_filtered_by_length_are_in_the_ledger(tmp_path: Path) -> None:
    documents = ["x" * 10, "y" * 60, "z" * 100, "ä" * 60]
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": t} for t in documents])
    plain = recipe("pretrain").to_dict()
    plain["preprocessing"] |= {"min_chars": 50, "max_chars": 80}
    tally = prepare(source, tmp_path / "out", PipelineConfig.from_dict(plain)).run()
    assert tally.filtered == {"min_chars": 1, "max_chars": 1}
    assert tally.kept == 2
    assert tally.balanced


def stripping(folder: Path) -> Path:
    """A tokenizer to which blanks are nothing."""
    folder.mkdir()
    content = json.loads((gpt2_like() / "tokenizer.json").read_text())
    content["normalizer"] = {"type": "Strip", "strip_left": True, "strip_right": True}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    shutil.copy(gpt2_like() / "tokenizer_config.json", folder)
    return folder


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("most", [None, 3])
def test_blank_text_can_be_kept_where_it_has_tokens(
    one_by_one: bool, most: int | None, tmp_path: Path
) -> None:
    documents = ["a", "", " ", " \n", "", "b", "\t", "c", "d"]
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": t, "by": "x"} for t in documents])
    plain = recipe("pretrain").to_dict()
    plain["preprocessing"] |= {"min_chars": 0, "keep_blank": True, "max_items": most}
    plain["input"]["sections"][0]["add_special_tokens"] = False
    plain["output"]["domain_key"] = "by" if one_by_one else None  # record by record
    config = PipelineConfig.from_dict(plain)

    kept: list[list[str]] = []
    for name, path in (("blank", gpt2_like()), ("strip", stripping(tmp_path / "tokenizer"))):
        options = {"workers": 0, "backend": "reference"}
        tally = Pipeline(config, source, tmp_path / name, path, **options).run()
        store, tokenizer = open_store(tmp_path / name), open_tokenizer(path, backend="reference")
        records = [store.record(i, "sequence") for i in range(store.documents)]
        assert all(int(ids[-1]) == tokenizer.eos_id and len(ids) > 1 for ids in records)
        kept.append([tokenizer.decode(ids[:-1]) for ids in records])
        assert set(tally.filtered) <= {"empty"}
        assert tally.balanced
    assert kept[0] == ["a", " ", " \n", "b", "\t", "c", "d"][:most]
    assert kept[1] == ["a", "b", "c", "d"][:most]


def test_nothing_kept_is_an_error_that_says_why(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": "short"}])
    plain = recipe("pretrain").to_dict()
    plain["preprocessing"]["min_chars"] = 50
    with pytest.raises(DataError, match=r"not one of 1 documents was kept.*min_chars"):
        prepare(source, tmp_path / "out", PipelineConfig.from_dict(plain)).run()


# ------------------------------------------------------------------------------------- recipes


@pytest.mark.parametrize("most", [1, 7, 16, 59, 60, 100])
@pytest.mark.parametrize("workers", [0, 2])
def test_max_items_are_the_first_accepted_documents_of_the_input(
    corpus: Path, tmp_path: Path, small_works: None, most: int, workers: int
) -> None:
    config = PipelineConfig.from_dict(with_items(most))
    tally = prepare(corpus, tmp_path / "out", config, workers=workers).run()
    assert tally.kept == min(most, 60)
    store, tokenizer = open_store(tmp_path / "out"), open_tokenizer(gpt2_like())
    assert store.documents == min(most, 60)
    last = store.record(store.documents - 1, "sequence")
    assert tokenizer.decode(last[:-1]) == texts()[min(most, 60) - 1]


def chats(count: int) -> list[dict[str, Any]]:
    return [
        {
            "kind": ["math", "code"][n % 2],
            "messages": [
                {"role": "user", "content": f"What is {n} plus {n}?"},
                {"role": "assistant", "content": f"It is {2 * n}. " * (n % 5 + 1)},
            ],
        }
        for n in range(count)
    ]


def chat_recipe(**changed: Any) -> PipelineConfig:
    plain = recipe("chat").to_dict()
    for table, values in changed.items():
        plain[table] |= values
    return PipelineConfig.from_dict(plain)


def test_chats_become_masked_sequences_by_domain(tmp_path: Path, small_works: None) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", chats(40))
    config = chat_recipe(output={"domain_key": "kind"})
    tally = Pipeline(config, source, tmp_path / "out", qwen_like(), workers=0).run()
    folders = [p.name for p in (tmp_path / "out").iterdir() if p.is_dir()]
    assert sorted(folders) == [".prepare", "code", "math"]
    store, tokenizer = open_store(tmp_path / "out"), open_tokenizer(qwen_like())
    assert (tally.kept, store.documents) == (40, 40)
    first = store.record(0, ["sequence", "loss_mask"])
    trained = tokenizer.decode(first["sequence"][first["loss_mask"] != 0])
    assert trained.startswith("It is 2. ")
    assert "What is" not in trained
    assert tally.trained == int(store.read(0, len(store), "loss_mask").sum())


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split"])
@pytest.mark.parametrize("mode", ["none", "doc_reset", "continuous"])
def test_packing_orders_records_by_rows_and_the_ledger_adds_up(
    tmp_path: Path, small_works: None, strategy: str, mode: str
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", chats(40))
    processing = {"packing_strategy": strategy, "max_packed_len": 48}
    config = chat_recipe(preprocessing=processing, output={"position_ids_mode": mode})
    out = tmp_path / "out"
    tally = Pipeline(config, source, out, qwen_like(), workers=0).run()
    store = open_store(out)
    assert tally.balanced
    assert tally.tokens == len(store)
    assert tally.records == store.documents
    assert (tally.truncated_tokens > 0) == (strategy == "bfd")
    rows: dict[tuple[str, int], int] = {}
    shard = ""
    at: dict[tuple[str, int], int] = {}
    for number in range(store.documents):
        found = source_of(out, number)
        assert found is not None
        key = (shard_of(store, number), found["row"])
        length = len(store.record(number, "sequence"))
        if mode != "none":
            first = 0 if mode == "doc_reset" else at.get(key, 0)
            positions = store.record(number, "position_ids").tolist()
            assert positions == list(range(first, first + length))
        at[key] = at.get(key, 0) + length
        rows[key] = rows.get(key, 0) + length
    assert max(rows.values()) <= 48
    assert len(rows) == tally.rows
    assert tally.rows * 48 == tally.tokens + tally.padding
    assert shard == ""


def shard_of(store: Any, record: int) -> str:
    bounds = store.bounds("sequence")
    begin = int(store.document_spans([record], "sequence")[0][0])
    return str(int(np.searchsorted(bounds, begin, "right")))


def test_without_packing_long_records_are_truncated_and_that_is_shown(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", chats(10))
    config = chat_recipe(preprocessing={"max_packed_len": 20, "truncation_mode": "keep_end"})
    tally = Pipeline(config, source, tmp_path / "out", qwen_like(), workers=0).run()
    store = open_store(tmp_path / "out")
    assert int(store.record_lengths("sequence").max()) == 20
    assert tally.truncated_documents == 10
    assert tally.balanced
    tokenizer = open_tokenizer(qwen_like())
    assert tokenizer.decode(store.record(0, "sequence")).endswith("<|im_end|>\n")


def test_pairs_and_groups_load_for_training(tmp_path: Path) -> None:
    from penstock import DatasetFactory

    def turn(role: str, content: str) -> dict[str, str]:
        return {"role": role, "content": content}

    pairs = [
        {
            "chosen": [turn("user", "hi"), turn("assistant", f"good {n}")],
            "rejected": [turn("user", "hi"), turn("assistant", f"bad {n} " * 3)],
        }
        for n in range(7)
    ]
    source = write_jsonl(tmp_path / "pairs.jsonl", pairs)
    Pipeline(recipe("dpo"), source, tmp_path / "dpo", qwen_like(), workers=0).run()
    dataset = DatasetFactory.load("dpo", tmp_path / "dpo", 0)
    assert len(dataset) == 7
    assert set(dataset[0]) == {"chosen", "rejected", "chosen_mask", "rejected_mask"}
    groups = [
        {
            "prompt": [turn("user", f"count to {n}")],
            "responses": [f"one {n}", "", "two " * n][: n % 3 + 1],
            "rewards": [0.25, -1.5, 3.0][: n % 3 + 1],
        }
        for n in range(6)
    ]
    source = write_jsonl(tmp_path / "groups.jsonl", groups)
    Pipeline(recipe("grpo"), source, tmp_path / "grpo", qwen_like(), workers=0).run()
    dataset = DatasetFactory.load("grpo", tmp_path / "grpo", 0)
    assert [len(dataset[i]["responses"]) for i in range(6)] == [1, 2, 3, 1, 2, 3]
    assert dataset[2]["rewards"].tolist() == [0.25, -1.5, 3.0]
    assert dataset[1]["responses"][1].tolist() == []


@pytest.mark.parametrize("built_in", ["pretrain", "chat"])
def test_a_missing_field_or_a_wrong_type_stops_any_recipe_by_file_and_line(
    tmp_path: Path, built_in: Any
) -> None:
    good = [{"text": t, **c} for t, c in zip(texts(4), chats(4), strict=True)]
    for bad in ({"other": 1}, {"messages": 5, "text": 5}):
        source = write_jsonl(tmp_path / "a.jsonl", [*good, bad, *good])
        for domain in (None, "kind"):
            plain = recipe(built_in).to_dict()
            plain["output"]["domain_key"] = domain
            config = PipelineConfig.from_dict(plain)
            pipe = Pipeline(config, source, tmp_path / "out", qwen_like(), workers=0)
            with pytest.raises(DataError, match=r"a\.jsonl, line 5"):
                pipe.run()


@pytest.mark.parametrize("workers", [0, 1, 2, 3])
def test_what_lies_past_max_items_is_not_seen(
    tmp_path: Path, small_works: None, workers: int
) -> None:
    good = [{"text": t} for t in texts(60)]
    trees = set()
    for name, documents in {
        "later": [*good[:50], BAD[0], *good[50:]],
        "soon": [*good[:21], BAD[0], *good[21:]],
    }.items():
        source = write_jsonl(tmp_path / name / "a.jsonl", documents)
        out = tmp_path / f"{name}-out"
        tally = prepare(
            source, out, PipelineConfig.from_dict(with_items(20)), workers=workers
        ).run()
        assert (tally.documents, tally.kept, tally.rejects) == (20, 20, 0)
        trees.add(open_store(out).read(0, tally.tokens, "sequence").tobytes())
    assert len(trees) == 1
    source = write_jsonl(tmp_path / "before" / "a.jsonl", [*good[:5], BAD[0], *good[5:]])
    config = PipelineConfig.from_dict(with_items(20))
    with pytest.raises(DataError, match="line 6"):
        prepare(source, tmp_path / "x", config, workers=workers).run()


@pytest.mark.parametrize("packing", ["simple", "bfd", "bfd_split"])
@pytest.mark.parametrize("name", ["pretrain", "chat"])
def test_the_ledger_counts_what_is_trained_in_what_was_written(
    tmp_path: Path, small_works: None, packing: str, name: Any
) -> None:
    both = [{"text": t, **c} for t, c in zip(texts(30), chats(30), strict=True)]
    source = write_jsonl(tmp_path / "a.jsonl", both)
    plain = recipe(name).to_dict()
    plain["preprocessing"] |= {"packing_strategy": packing, "max_packed_len": 40}
    config = PipelineConfig.from_dict(plain)
    out = tmp_path / "out"
    tally = Pipeline(
        config, source, out, qwen_like(), workers=0, policy="reject", max_rejects=1
    ).run()
    store = open_store(out)
    assert tally.balanced
    assert (tally.documents, tally.tokens, tally.records) == (30, len(store), store.documents)
    masks = store.read(0, len(store), "loss_mask") if name == "chat" else np.ones(len(store))
    assert tally.trained == int(masks.sum())
    if name == "chat" and packing != "bfd_split":
        ends = np.cumsum(store.record_lengths("sequence"))
        assert all(part.any() for part in np.split(masks, ends[:-1]))
        assert tally.rejected.get("no_trained_token", 0) == 30 - store.documents


def test_pairs_and_groups_count_their_trained_tokens(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "good day"}]
    source = write_jsonl(tmp_path / "a.jsonl", [{"chosen": turns, "rejected": turns}] * 3)
    tally = Pipeline(recipe("dpo"), source, tmp_path / "out", qwen_like(), workers=0).run()
    store = open_store(tmp_path / "out")
    names = ("chosen_mask", "rejected_mask")
    wanted = sum(int(store.read(0, store.total(name), name).sum()) for name in names)
    assert tally.trained == wanted > 0
    shown = run("inspect", str(tmp_path / "out"), "--tokenizer", str(qwen_like())).output
    assert "--- chosen of document 0" in shown
    assert "--- rejected of document 0" in shown
    assert "]]good day" in shown


# ---------------------------------------------------------------------------------- what changes


def test_another_eos_or_chat_template_is_another_tokenizer(tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    shutil.copytree(qwen_like(), folder)
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": t} for t in texts(5)])
    out = tmp_path / "out"
    Pipeline(recipe("pretrain"), source, out, folder, workers=0).run()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer = open_tokenizer(folder)
    other = next(t for t, i in tokenizer.specials.items() if i != tokenizer.eos_id)
    for changed in ({"eos_token": other}, {"chat_template": "{{ messages }}"}):
        (folder / "tokenizer_config.json").write_text(json.dumps(settings | changed))
        with pytest.raises(ConfigError, match="from something else: tokenizer"):
            Pipeline(recipe("pretrain"), source, out, folder, workers=0).run()


@pytest.mark.parametrize("stop", range(0, 40, 5))
def test_an_overwrite_that_is_killed_is_finished_by_the_next_run(
    tmp_path: Path, small_works: None, monkeypatch: Any, stop: int
) -> None:
    first = write_jsonl(tmp_path / "a" / "a.jsonl", [{"text": t} for t in texts(60)])
    second = write_jsonl(tmp_path / "b" / "b.jsonl", [{"text": t} for t in texts(20)])
    prepare(second, tmp_path / "whole").run()
    out = tmp_path / "out"
    prepare(first, out).run()

    class Killed(Exception):
        pass

    with monkeypatch.context() as patched:
        calls = iter(range(10**6))
        for name in ("rmtree", "unlink"):
            owner: Any = shutil if name == "rmtree" else Path

            real = getattr(owner, name)

            def stopping(*arguments: Any, real: Any = real, **options: Any) -> Any:
                if next(calls) == stop:
                    raise Killed
                return real(*arguments, **options)

            patched.setattr(owner, name, stopping)
        with suppress(Killed):
            prepare(second, out, overwrite=True).run()
    prepare(second, out).run()
    assert tree(out) == tree(tmp_path / "whole")
    assert open_store(out).documents == 20


def test_shards_that_something_else_left_are_not_committed(tmp_path: Path) -> None:
    from penstock import ShardWriter

    source = write_jsonl(tmp_path / "a.jsonl", [{"text": t} for t in texts(5)])
    with ShardWriter(tmp_path / "out", {"sequence": "uint16"}, domain="x", commit=False) as writer:
        writer.append({"sequence": [1, 2]})
    with pytest.raises(ConfigError, match="parts of one, that were not prepared here"):
        prepare(source, tmp_path / "out").run()


def test_a_file_that_is_written_to_meanwhile_is_noticed(tmp_path: Path, small_works: None) -> None:
    source = write_jsonl(tmp_path / "in" / "a.jsonl", [{"text": t} for t in texts(30)])

    def write(at: Progress) -> None:
        source.write_bytes(source.read_bytes())  # the same size, and even the same bytes
        os.utime(source, ns=(1, 1))

    with pytest.raises(DataError, match="was changed while it was being prepared"):
        prepare(source.parent, tmp_path / "out").run(write)
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_an_output_among_the_documents_is_refused(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in" / "a.jsonl", [{"text": t} for t in texts(3)])
    with pytest.raises(ConfigError, match=r"lies inside .*in, whose files are the documents"):
        prepare(source.parent, source.parent / "out").run()


@pytest.mark.parametrize(
    "name", ["manifest.json", "rejects.jsonl", "x" * 300, "é" * 140, "../up", ""]
)
def test_domains_that_cannot_name_a_folder_are_rejected(tmp_path: Path, name: str) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [{**chats(1)[0], "kind": k} for k in ("good", name)])
    config = chat_recipe(output={"domain_key": "kind"})
    options: dict[str, Any] = {"workers": 0, "policy": "reject", "max_rejects": 1}
    tally = Pipeline(config, source, tmp_path / "out", qwen_like(), **options).run()
    assert tally.rejected == {"bad_domain": 1}
    assert verify(tmp_path / "out").ok


def test_dtypes_of_keys_that_are_none_or_cannot_be_are_refused(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", chats(3))
    for dtype in ({"sequnce": "int32"}, {"loss_mask": "float32"}, {"position_ids": "uint8"}):
        config = chat_recipe(output={"dtype": dtype, "position_ids_mode": "doc_reset"})
        with pytest.raises(ConfigError, match=next(iter(dtype))):
            Pipeline(config, source, tmp_path / "out", qwen_like(), workers=0).run()


def test_an_input_that_names_nothing_is_an_error_though_others_do(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": t} for t in texts(3)])
    with pytest.raises(PenstockError, match=r"\*\.parquet holds no file"):
        prepare([source, tmp_path / "*.parquet"], tmp_path / "out").run()
    empty = write_jsonl(tmp_path / "empty.jsonl", [])
    with pytest.raises(DataError, match="the input holds no documents"):
        prepare(empty, tmp_path / "out").run()


# -------------------------------------------------------------------------------------- a bad end


def test_a_worker_that_is_killed_is_an_error_that_says_so(
    corpus: Path, tmp_path: Path, small_works: None
) -> None:
    import multiprocessing

    def kill_one(at: Progress) -> None:
        for child in multiprocessing.active_children():
            os.kill(child.pid or 0, signal.SIGKILL)

    with pytest.raises(DataError, match=r"a worker was killed by SIGKILL .* run the same command"):
        prepare(corpus, tmp_path / "out", workers=2).run(kill_one)
    assert multiprocessing.active_children() == []
    prepare(corpus, tmp_path / "out").run()
    prepare(corpus, tmp_path / "whole").run()
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_ctrl_c_ends_a_run_and_its_workers(corpus: Path, tmp_path: Path) -> None:
    import psutil

    script = tmp_path / "run.py"
    script.write_text(RUN)
    arguments = [str(script), str(corpus), str(tmp_path / "out"), str(gpt2_like()), "2"]
    process = subprocess.Popen(
        [sys.executable, *arguments], cwd=ROOT, start_new_session=True, stderr=subprocess.PIPE
    )
    end = time.monotonic() + 60
    children: list[Any] = []
    while len(children) < 2 or not list((tmp_path / "out" / ".prepare").glob("parts/*")):
        assert time.monotonic() < end
        assert process.poll() is None
        children = psutil.Process(process.pid).children(recursive=True)
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode != 0
    assert b"Exception ignored" not in err
    psutil.wait_procs(children, timeout=10)
    assert not any(child.is_running() for child in children)
    prepare(corpus, tmp_path / "out").run()


FULL = """
import resource, sys
from penstock.errors import PenstockError
from penstock.prepare import Pipeline, recipe
if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
    import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        Pipeline(recipe("pretrain"), *sys.argv[1:4], workers=int(sys.argv[4])).run()
    except (PenstockError, OSError) as error:
        print(type(error).__name__, error)
"""


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_full_disk_is_a_clear_end_and_the_run_is_taken_up(tmp_path: Path, workers: str) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": t} for t in texts(80)])
    script = tmp_path / "run.py"
    script.write_text(FULL)
    out = tmp_path / "out"
    arguments = [str(script), str(source), str(out), str(gpt2_like()), workers]
    ran = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert "File too large" in ran.stdout
    assert not (out / "manifest.json").exists()
    prepare(source, out).run()
    assert verify(out).ok


def test_too_little_disk_is_said_before_anything_starts(
    corpus: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    from types import SimpleNamespace

    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    with pytest.raises(ConfigError, match="MB of disk left"):
        prepare(corpus, tmp_path / "out").run()


# ---------------------------------------------------------------------------------- command line


def run(*arguments: str) -> Any:
    return CliRunner().invoke(main, list(arguments))


def test_prepare_and_inspect_from_the_command_line(corpus: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    given = ["--tokenizer", str(gpt2_like()), "--workers", "0"]
    result = run("prepare", str(corpus), "-o", out, *given)
    assert result.exit_code == 0, result.output
    assert "60 documents in, 60 kept" in result.output
    again = run("prepare", str(corpus), "-o", out, *given, "--json")
    assert json.loads(again.output)["kept"] == 60
    shown = run("inspect", out, "--tokenizer", str(gpt2_like()), "--samples", "3")
    assert shown.exit_code == 0, shown.output
    assert "60 documents" in shown.output
    assert "lengths, in tokens" in shown.output
    assert texts()[0].splitlines()[0][:20] in shown.output
    plain = json.loads(run("inspect", out, "--json").output)
    assert plain["documents"] == 60
    assert plain["ledger"]["kept"] == 60
    assert sum(plain["lengths"]) == 60


def test_masked_text_is_told_apart_and_hostile_text_is_harmless(tmp_path: Path) -> None:
    hostile = chats(1)
    hostile[0]["messages"][1]["content"] = "\x1b[31mred\x07"
    source = write_jsonl(tmp_path / "a.jsonl", hostile)
    Pipeline(recipe("chat"), source, tmp_path / "out", qwen_like(), workers=0).run()
    shown = run("inspect", str(tmp_path / "out"), "--tokenizer", str(qwen_like()))
    assert "[[" in shown.output
    assert "\x1b[31m" not in shown.output
    assert "\\x1b[31mred\\x07" in shown.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "nowhere"),
        (["{corpus}", "--recipe", "chat", "-c", "{recipe}"], "not both"),
        (["{corpus}", "-c", "{recipe}"], "unknown"),
        (["{corpus}", "--max-rejects", "7"], "max_rejects"),
    ],
)
def test_mistakes_are_one_sentence(
    corpus: Path, tmp_path: Path, arguments: list[str], said: str
) -> None:
    file = tmp_path / "recipe.json"
    file.write_text('{"inputs": {}}')
    filled = [each.format(corpus=corpus, recipe=file) for each in arguments]
    result = run("prepare", *filled, "-o", str(tmp_path / "out"), "--tokenizer", str(gpt2_like()))
    assert result.exit_code == 2
    assert said in result.stderr.lower()
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.output


def test_llamas_documents_have_one_bos_whatever_its_post_processor_adds(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": t} for t in texts(3)])
    Pipeline(recipe("pretrain"), source, tmp_path / "out", llama3_like(), workers=0).run()
    tokenizer, store = open_tokenizer(llama3_like()), open_store(tmp_path / "out")
    for number in range(3):
        tokens = store.record(number, "sequence").tolist()
        assert (tokens[0], tokens[-1]) == (tokenizer.bos_id, tokenizer.eos_id)
        assert tokens.count(tokenizer.bos_id) == 1


def test_what_was_prepared_trains(corpus: Path, tmp_path: Path) -> None:
    from penstock import DataConfig, build_dataloader

    prepare(corpus, tmp_path / "out").run()
    config = DataConfig(str(tmp_path / "out"), packing="best_fit_decreasing")
    loader = build_dataloader(config, batch_size=2, seq_len=128)
    assert len(list(loader)) == len(loader) > 2
