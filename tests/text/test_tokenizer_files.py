"""A tokenizer's own files say which token ends a document, and how many there are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError, DataError, MissingData
from penstock.text import eos_token_id, vocab_size

BPE: dict[str, Any] = {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "</s>": 2}}}


def folder(
    path: Path, tokenizer: object = None, config: object = None, special: object = None
) -> Path:
    """A folder with those of a tokenizer's files that are given; bytes go in as they are."""
    files = {
        "tokenizer.json": BPE if tokenizer is None else tokenizer,
        "tokenizer_config.json": config,
        "special_tokens_map.json": special,
    }
    for name, content in files.items():
        if isinstance(content, bytes):
            (path / name).write_bytes(content)
        elif content is not None:
            (path / name).write_text(json.dumps(content))
    return path


# ------------------------------------------------------------------------------------ the EOS id


@pytest.mark.parametrize(
    "token", ["</s>", {"content": "</s>", "lstrip": False}], ids=["string", "dict"]
)
def test_eos_is_named_by_a_string_or_by_a_dict(tmp_path: Path, token: object) -> None:
    assert eos_token_id(folder(tmp_path, config={"eos_token": token})) == 2


def test_eos_may_be_an_added_token_that_the_vocabulary_has_not(tmp_path: Path) -> None:
    tokenizer = {**BPE, "added_tokens": [{"content": "<|end|>", "id": 7, "special": True}]}
    found = folder(tmp_path, tokenizer, {"eos_token": "<|end|>"})
    assert eos_token_id(found) == 7
    assert vocab_size(found) == 8


def test_an_added_token_wins_over_the_vocabulary(tmp_path: Path) -> None:
    tokenizer = {**BPE, "added_tokens": [{"content": "</s>", "id": 5}]}
    assert eos_token_id(folder(tmp_path, tokenizer, {"eos_token": "</s>"})) == 5


def test_special_tokens_map_is_read_where_the_config_names_no_eos(tmp_path: Path) -> None:
    config: dict[str, Any] = {"eos_token": None, "bos_token": "a"}
    assert eos_token_id(folder(tmp_path, config=config, special={"eos_token": "b"})) == 1
    (tmp_path / "tokenizer_config.json").unlink()
    assert eos_token_id(tmp_path) == 1


def test_the_config_wins_over_special_tokens_map(tmp_path: Path) -> None:
    found = folder(tmp_path, config={"eos_token": "a"}, special={"eos_token": "b"})
    assert eos_token_id(found) == 0


def test_the_tokenizer_json_itself_may_be_named(tmp_path: Path) -> None:
    file = folder(tmp_path, config={"eos_token": "</s>"}) / "tokenizer.json"
    assert eos_token_id(file) == 2
    assert vocab_size(str(file)) == 3


def test_a_unigram_vocabulary_is_a_list_in_order_of_id(tmp_path: Path) -> None:
    vocab = [["<unk>", 0.0], ["</s>", 0.0], ["▁a", -2.5]]
    found = folder(tmp_path, {"model": {"vocab": vocab}}, {"eos_token": "</s>"})
    assert eos_token_id(found) == 1
    assert vocab_size(found) == 3


def test_a_vocabulary_with_holes_ends_at_its_highest_id(tmp_path: Path) -> None:
    assert vocab_size(folder(tmp_path, {"model": {"vocab": {"a": 0, "b": 70_000}}})) == 70_001


# --------------------------------------------------------------------------------------- refusals


def test_a_tokenizer_without_an_eos_says_where_to_name_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"names no eos_token in tokenizer_config\.json"):
        eos_token_id(folder(tmp_path, config={"bos_token": "a"}))


@pytest.mark.parametrize("token", ["</missing>", ["</s>"], 2, {"content": ["a"]}])
def test_an_eos_that_is_no_token_is_named_with_its_file(tmp_path: Path, token: object) -> None:
    with pytest.raises(DataError, match=r"tokenizer_config\.json names .* as EOS"):
        eos_token_id(folder(tmp_path, config={"eos_token": token}))


@pytest.mark.parametrize("ask", [eos_token_id, vocab_size])
def test_a_path_without_a_tokenizer_is_missing_data(tmp_path: Path, ask: Any) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(MissingData, match=r"neither a tokenizer\.json nor a folder"):
            ask(path)


@pytest.mark.parametrize(
    "broken",
    [b"", b'{"model": ', b"\xff\xfe\x00", b"[" * 100_000],
    ids=["empty", "cut short", "not text", "too deep"],
)
def test_broken_json_is_named_with_its_file(tmp_path: Path, broken: bytes) -> None:
    with pytest.raises(DataError, match=r"tokenizer\.json cannot be read as JSON"):
        vocab_size(folder(tmp_path, broken))
    folder(tmp_path, BPE, broken)
    with pytest.raises(DataError, match=r"tokenizer_config\.json cannot be read as JSON"):
        eos_token_id(tmp_path)


def test_json_that_is_no_object_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="should hold a JSON object, and holds a list"):
        vocab_size(folder(tmp_path, b"[1]"))


@pytest.mark.parametrize(
    "tokenizer",
    [
        {"version": "1.0"},
        {"model": []},
        {"model": {"vocab": "abc"}},
        {"model": {"vocab": {"a": "zero"}}},
        {"model": {"vocab": {"a": 1.5}}},
        {"model": {"vocab": [[], ["a", 0.0]]}},
        {"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 1}]},
        {"model": {"vocab": {"a": 0}}, "added_tokens": ["b"]},
        {"model": {"vocab": {"a": 0}}, "added_tokens": 3},
    ],
    ids=str,
)
def test_a_vocabulary_of_another_shape_is_refused_in_words(
    tmp_path: Path, tokenizer: object
) -> None:
    with pytest.raises(DataError, match=r"no vocabulary where tokenizer\.json keeps it"):
        vocab_size(folder(tmp_path, tokenizer))


def test_an_empty_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="empty vocabulary"):
        vocab_size(folder(tmp_path, {"model": {"vocab": {}}}))
