"""Ranks of tiktoken give tiktoken's ids, on both backends."""

from __future__ import annotations

import base64
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.text.tokenizers_for_tests import gpt2_like, stdlib_texts

from penstock.errors import ConfigError, DataError
from penstock.text import eos_token_id, vocab_size
from penstock.text.hard_set import hard_set
from penstock.text.tiktoken_files import ALPHABET, ENCODINGS, onig_pattern
from penstock.text.tokenizer import open_tokenizer

tiktoken = pytest.importorskip("tiktoken")
NANOCHAT = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)


def ranks(size: int = 3000) -> dict[bytes, int]:
    """Bytes to ranks: a trained vocabulary in order of its merges, as ranks are numbered."""
    back = {letter: byte for byte, letter in ALPHABET.items()}
    vocab = json.loads((gpt2_like() / "tokenizer.json").read_text())["model"]["vocab"]
    tokens = [bytes(back[letter] for letter in token) for token in sorted(vocab, key=vocab.get)]
    singles = [bytes([byte]) for byte in range(256)]
    return {
        token: rank
        for rank, token in enumerate([*singles, *(t for t in tokens if len(t) > 1)][:size])
    }


def write(path: Path, content: dict[bytes, int], **sidecar: Any) -> Path:
    lines = [base64.b64encode(token) + b" %d\n" % rank for token, rank in content.items()]
    path.write_bytes(b"".join(lines))
    if sidecar:
        path.with_name(path.name + ".json").write_text(json.dumps(sidecar))
    return path


def encoding(pattern: str, specials: dict[str, int]) -> Any:
    return tiktoken.Encoding(
        "test", pat_str=pattern, mergeable_ranks=ranks(), special_tokens=specials
    )


@pytest.mark.parametrize("backend", ["reference", "fast"])
@pytest.mark.parametrize("name", ["r50k_base", "p50k_edit", "cl100k_base", "o200k_base"])
def test_ids_are_those_of_tiktoken(tmp_path: Path, name: str, backend: Any) -> None:
    ours = open_tokenizer(write(tmp_path / f"{name}.tiktoken", ranks()), backend=backend)
    theirs = encoding(*ENCODINGS[name])
    assert ours.specials == ENCODINGS[name][1]
    assert ours.eos_id == ours.specials["<|endoftext|>"]
    assert ours.vocab_size == theirs.n_vocab
    texts = [*hard_set(ours.specials), *stdlib_texts()]
    for specials, encode in (
        ("text", theirs.encode_ordinary),
        ("parse", lambda text: theirs.encode(text, allowed_special="all")),
    ):
        ids, offsets = ours.encode(texts, specials=specials)
        for i, text in enumerate(texts):
            assert ids[offsets[i] : offsets[i + 1]].tolist() == encode(text), text[:80]


@settings(max_examples=150)
@given(st.data())
def test_any_ranks_merge_as_tiktoken_merges_them(tmp_path_factory: Any, data: Any) -> None:
    # Not trained, so ranks are in no order that a training would give them.
    words = st.text("abc", min_size=2, max_size=6).map(str.encode)
    tokens = data.draw(st.lists(words, unique=True, max_size=25))
    content = {bytes([byte]): byte for byte in range(256)}
    content |= {token: 256 + i for i, token in enumerate(tokens)}
    pattern = r"\p{L}+|\P{L}+"
    theirs = tiktoken.Encoding("test", pat_str=pattern, mergeable_ranks=content, special_tokens={})
    file = write(tmp_path_factory.mktemp("ranks") / "x.tiktoken", content, pattern=pattern)
    ours = open_tokenizer(file, backend="reference")
    text = data.draw(st.text("abc ", max_size=60))
    assert ours.encode([text])[0].tolist() == theirs.encode_ordinary(text)


def test_a_sidecar_names_an_encoding_or_a_pattern(tmp_path: Path) -> None:
    file = write(tmp_path / "mine.tiktoken", ranks(), encoding="cl100k_base")
    assert open_tokenizer(file).eos_id == 100257
    assert open_tokenizer(tmp_path).eos_id == 100257  # the folder that holds it
    assert (eos_token_id(file), vocab_size(file)) == (100257, 100277)
    specials = {"<|end|>": 5000}
    write(file, ranks(), pattern=NANOCHAT, special_tokens=specials, eos_token="<|end|>")
    with pytest.warns(UserWarning, match="slower backend: gigatoken does not know its kind"):
        tokenizer = open_tokenizer(file)
    assert (tokenizer.eos_id, tokenizer.vocab_size) == (5000, 5001)
    assert tokenizer.encode(["12345 ab"])[0].tolist() == encoding(NANOCHAT, {}).encode("12345 ab")


def test_the_hash_does_not_depend_on_the_files_name(tmp_path: Path) -> None:
    a = write(tmp_path / "cl100k_base.tiktoken", ranks())
    b = write(tmp_path / "other.tiktoken", ranks(), encoding="cl100k_base")
    c = write(tmp_path / "o200k_base.tiktoken", ranks())
    hashes = [open_tokenizer(file, backend="reference").content_hash for file in (a, b, c)]
    assert hashes[0] == hashes[1] != hashes[2]


def test_ranks_whose_regex_is_not_known_say_how_to_state_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"write mine\.tiktoken\.json beside it"):
        open_tokenizer(write(tmp_path / "mine.tiktoken", ranks()))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"YQ== 0\nnot base64!\n", "line 2: found b'not base64!'"),
        (b"YQ== zero\n", "line 1"),
        (b"YQ== 0\n", "no rank for 255 of the 256 bytes"),
    ],
)
def test_damaged_ranks_are_refused_with_their_line(
    tmp_path: Path, content: bytes, words: str
) -> None:
    (tmp_path / "cl100k_base.tiktoken").write_bytes(content)
    with pytest.raises(DataError, match=words):
        open_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("sidecar", "words"),
    [
        ({"pattern": 3}, "should have a string as pattern"),
        ({"pattern": "a", "special_tokens": ["x"]}, "should have a string as pattern"),
        ({"pattern": "a", "eos_token": "<|end|>"}, "names '<|end|>' as EOS"),
        ({"pattern": "a", "special_tokens": {"x": 7}}, "has id 7, which is a rank too"),
        ({"pattern": "(", "special_tokens": {}}, "cannot be opened by tokenizers"),
    ],
    ids=str,
)
def test_a_sidecar_that_cannot_be_meant_is_refused(
    tmp_path: Path, sidecar: Any, words: str
) -> None:
    file = write(tmp_path / "mine.tiktoken", ranks(), **sidecar)
    with pytest.raises(DataError, match=words.replace("|", r"\|")):
        open_tokenizer(file)


# -------------------------------------------------------------------------------- nanochat's pickle


def nanochat(folder: Path) -> Path:
    specials = {token: 3000 + i for i, token in enumerate(["<|bos|>", "<|user_start|>"])}
    (folder / "tokenizer.pkl").write_bytes(pickle.dumps(encoding(NANOCHAT, specials)))
    return folder


def test_a_pickle_is_opened_only_when_it_is_trusted(tmp_path: Path) -> None:
    for path in (nanochat(tmp_path), tmp_path / "tokenizer.pkl"):
        with pytest.raises(ConfigError, match="pass trust_pickle=True"):
            open_tokenizer(path)


def test_nanochats_pickle_gives_its_ids_and_its_bos(tmp_path: Path) -> None:
    ours = open_tokenizer(nanochat(tmp_path), backend="reference", trust_pickle=True)
    theirs = pickle.loads((tmp_path / "tokenizer.pkl").read_bytes())
    assert (ours.bos_id, ours.eos_id, ours.vocab_size) == (3000, None, 3002)
    texts = [*hard_set(ours.specials), *stdlib_texts()[:5]]
    ids, offsets = ours.encode(texts)
    for i, text in enumerate(texts):
        assert ids[offsets[i] : offsets[i + 1]].tolist() == theirs.encode_ordinary(text)
    again = pickle.loads(pickle.dumps(ours))
    assert again.encode(["abc"])[0].tolist() == ours.encode(["abc"])[0].tolist()


def test_a_pickle_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.pkl").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(DataError, match=r"holds a dict, expected a tiktoken\.Encoding"):
        open_tokenizer(tmp_path, trust_pickle=True)
    (tmp_path / "tokenizer.pkl").write_bytes(b"nothing of the kind")
    with pytest.raises(DataError, match="cannot be unpickled"):
        open_tokenizer(tmp_path, trust_pickle=True)


@pytest.mark.parametrize(
    ("pattern", "wanted"),
    [
        (r"\p{N}{1,3}+", r"(?>\p{N}{1,3})"),
        (r"[^\s\p{L}]{2}+$", r"(?>[^\s\p{L}]{2})\z"),
        (r"\p{L}++|[a$]|\$|\s++$", r"\p{L}++|[a$]|\$|\s++\z"),
        (r"\p{N}{1,3}|a{2}", r"\p{N}{1,3}|a{2}"),
    ],
)
def test_patterns_are_rewritten_where_oniguruma_reads_them_differently(
    pattern: str, wanted: str
) -> None:
    assert onig_pattern(pattern) == wanted
