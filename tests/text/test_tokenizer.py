"""Tokenizers: both backends give the reference's ids, and text stays text."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.text.tokenizers_for_tests import BYTE_LEVEL, FAMILIES, gpt2_like, qwen_like, stdlib_texts

from penstock.errors import ConfigError, DataError, MissingData, OutOfBounds
from penstock.text.hard_set import hard_set
from penstock.text.tokenizer import FileTokenizer, open_tokenizer

FAST = [name for name in FAMILIES if name != "unigram"]
OPENED: dict[tuple[str, str], FileTokenizer] = {}


def opened(family: str, backend: Any = "reference") -> FileTokenizer:
    """One of the families on a backend, opened once."""
    if (family, backend) not in OPENED:
        OPENED[family, backend] = open_tokenizer(FAMILIES[family](), backend=backend)
    return OPENED[family, backend]


def huggingface(folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def rows(ids: np.ndarray, offsets: np.ndarray) -> Iterator[list[int]]:
    for begin, end in itertools.pairwise(offsets):
        yield ids[begin:end].tolist()


def with_files(folder: Path, name: str, **files: object) -> Path:
    """A copy of a folder of tokenizer files, in which some are others."""
    copy = folder.parent / f"{folder.name}-{name}"
    copy.mkdir(exist_ok=True)
    for file in sorted(folder.iterdir()):
        (copy / file.name).write_bytes(file.read_bytes())
    for stem, content in files.items():
        (copy / f"{stem}.json").write_text(json.dumps(content))
    return copy


def content_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "tokenizer.json").read_text())


# ------------------------------------------------------------------------------ the reference's ids


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_are_those_of_tokenizers_where_specials_are_parsed(family: str) -> None:
    theirs = huggingface(FAMILIES[family]())
    ours = opened(family)
    texts = [*hard_set(ours.specials), *stdlib_texts()]
    found = rows(*ours.encode(texts, specials="parse"))
    for text, ids in zip(texts, found, strict=True):
        assert ids == theirs.encode(text, add_special_tokens=False).ids, text[:80]


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_are_those_of_tokenizers_told_to_take_specials_as_text(family: str) -> None:
    theirs = huggingface(FAMILIES[family]())
    theirs.encode_special_tokens = True
    ours = opened(family)
    for text, ids in zip(
        texts := [*hard_set(), *stdlib_texts()], rows(*ours.encode(texts)), strict=True
    ):
        if family == "unigram" and any(special in text for special in ours.specials):
            continue  # there tokenizers finds "</s>" among the pieces
        assert ids == theirs.encode(text, add_special_tokens=False).ids, text[:80]


@pytest.mark.parametrize("specials", ["text", "parse"])
@pytest.mark.parametrize("family", FAST)
def test_the_fast_backend_gives_the_ids_of_the_reference(family: str, specials: Any) -> None:
    fast, reference = opened(family, "fast"), opened(family)
    assert (fast.backend, reference.backend) == ("gigatoken", "tokenizers")
    texts = [*hard_set(fast.specials), *stdlib_texts()]
    wanted = rows(*reference.encode(texts, specials=specials))
    found = rows(*fast.encode(texts, specials=specials))
    for text, theirs, ours in zip(texts, wanted, found, strict=True):
        assert ours == theirs, text[:80]


@pytest.mark.parametrize("family", ["gpt2", "llama3", "qwen", "unigram"])
def test_transformers_agrees(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(FAMILIES[family]())
    ours = opened(family)
    texts = [*hard_set(ours.specials)[:60], *stdlib_texts()[:5]]
    for text, ids in zip(texts, rows(*ours.encode(texts, specials="parse")), strict=True):
        assert ids == theirs.encode(text, add_special_tokens=False), text[:80]
    assert (ours.eos_id, ours.pad_id) == (theirs.eos_token_id, theirs.pad_token_id)
    assert ours.vocab_size == len(theirs)


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
MIXED = st.lists(
    TEXT
    | st.sampled_from(
        ["<|endoftext|>", "</s>", "<think>", "<|im_end|>", " ", "\n", "\r\n", "  ", "👩‍👧"]
    ),
    max_size=8,
).map("".join)


@pytest.mark.parametrize("family", FAST)
@settings(max_examples=60)
@given(texts=st.lists(MIXED, max_size=12))
def test_both_backends_agree_on_any_unicode(family: str, texts: list[str]) -> None:
    for specials in ("text", "parse"):
        wanted, ends = opened(family).encode(texts, specials=specials)
        found, stops = opened(family, "fast").encode(texts, specials=specials)
        assert (found.tolist(), stops.tolist()) == (wanted.tolist(), ends.tolist())


def test_marks_newer_than_the_references_tables_get_its_ids_too() -> None:
    # Found with random text: gigatoken's NFC knows marks of which that of tokenizers has not heard.
    marks = [chr(0x0C3C), chr(0x08D3), chr(0x1AE9), chr(0x1E4EF), chr(0x0F72)]
    texts = [
        form.format(mark) for mark in marks for form in ("a{}\u0327\u0301", "x", "\u0301{0}{0}")
    ]
    theirs = huggingface(qwen_like())
    for threads in (1, 2):
        fast = open_tokenizer(qwen_like(), backend="fast", threads=threads)
        for batch in (texts, texts[:1], [text * 9000 for text in texts]):
            found = rows(*fast.encode(batch))
            assert list(found) == [theirs.encode(text).ids for text in batch]


def test_a_megabyte_of_one_character_is_encoded_by_both() -> None:
    texts = [character * (1 << 20) for character in " \na"]
    for family in ("gpt2", "cl100k", "qwen"):
        wanted, ends = opened(family).encode(texts)
        found, stops = opened(family, "fast").encode(texts)
        assert np.array_equal(wanted, found)
        assert np.array_equal(ends, stops)


# --------------------------------------------------------------------- text is text, and comes back


@pytest.mark.parametrize("backend", ["reference", "fast"])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_text_becomes_a_special_token_unless_parsed(family: str, backend: Any) -> None:
    if family == "unigram":
        backend = "reference"
    tokenizer = opened(family, backend)
    text = "a" + "b ".join(tokenizer.specials) + " c"
    special = {i for token, i in tokenizer.specials.items() if token != "<unk>"}
    assert not special & {*tokenizer.encode([text])[0].tolist()}
    assert special <= {*tokenizer.encode([text], specials="parse")[0].tolist()}


@pytest.mark.parametrize("backend", ["reference", "fast"])
def test_added_tokens_that_are_not_special_match_in_text_too(backend: Any) -> None:
    tokenizer = opened("qwen", backend)
    think = huggingface(qwen_like()).token_to_id("<think>")
    assert "<think>" not in tokenizer.specials
    assert think in tokenizer.encode(["so <think>hm"])[0]


def test_a_special_token_that_is_only_a_word_of_the_vocabulary_is_text_too() -> None:
    # Looked up as a whole word (ignore_merges), and no added token that could be left out.
    folder = FAMILIES["llama3"]()
    content = content_of(folder)
    content["added_tokens"] = []
    content["model"]["vocab"]["Ġstop"] = 9000
    content["model"]["merges"] = [
        pair for pair in content["model"]["merges"] if "".join(pair) != "Ġstop"
    ]
    config = {"eos_token": "Ġstop"}
    folder = with_files(folder, "word", tokenizer=content, tokenizer_config=config)
    for backend in ("reference", "fast"):
        tokenizer = open_tokenizer(folder, backend=backend)
        assert tokenizer.eos_id == 9000
        assert tokenizer.vocab_size == 9001
        assert 9000 not in tokenizer.encode(["do stop"])[0]


@pytest.mark.parametrize("backend", ["reference", "fast"])
@pytest.mark.parametrize("family", [name for name in BYTE_LEVEL if name != "qwen"])
def test_decode_gives_the_text_back(family: str, backend: Any) -> None:
    tokenizer = opened(family, backend)
    for text in [*hard_set(tokenizer.specials), *stdlib_texts()[:5]]:
        for specials in ("text", "parse"):
            assert tokenizer.decode(tokenizer.encode([text], specials=specials)[0]) == text


@pytest.mark.parametrize("family", FAMILIES)
def test_spans_cover_the_text_in_order_and_name_each_token(family: str) -> None:
    tokenizer = opened(family)
    texts = [text for text in hard_set(tokenizer.specials) if len(text) < 1000]
    texts += stdlib_texts()[:3]
    for specials in ("text", "parse"):
        ids, offsets, spans = tokenizer.encode_spans(texts, specials=specials)
        wanted, ends = tokenizer.encode(texts, specials=specials)
        assert np.array_equal(ids, wanted)
        assert np.array_equal(offsets, ends)
        assert spans.shape == (len(ids), 2)
        for text, begin, end in zip(texts, offsets[:-1], offsets[1:], strict=True):
            own = spans[begin:end]
            assert (np.diff(own[:, 0]) >= 0).all()
            assert (own[:, 0] <= own[:, 1]).all()
            if family in BYTE_LEVEL and family != "qwen":
                covered = {i for a, b in own.tolist() for i in range(a, b)}
                assert covered == set(range(len(text)))
                for i, (a, b) in zip(ids[begin:end], own.tolist(), strict=True):
                    spelt = tokenizer.decode([i])
                    assert spelt == text[a:b] or "�" in spelt


# ------------------------------------------------------------------------------------- what goes in


@pytest.mark.parametrize("backend", ["reference", "fast"])
def test_texts_may_come_in_any_form(backend: Any) -> None:
    tokenizer = opened("gpt2", backend)
    texts = ["", "one", "zwei größer", "", "三 👍", ""]
    ids, offsets = tokenizer.encode(texts)
    assert (ids.dtype, offsets.dtype) == (np.uint32, np.int64)
    large = pa.array(texts, pa.large_string())
    forms: list[Any] = [
        tuple(texts),
        [text.encode() for text in texts],
        large,
        pa.array(texts, pa.string()),
        pa.array([text.encode() for text in texts], pa.binary()),
        pa.array([text.encode() for text in texts], pa.large_binary()),
        pa.array(["x", *texts, "y"], pa.large_string())[1:-1],
        pa.chunked_array([large[:2], large[2:]]),
        large.dictionary_encode(),
    ]
    for form in forms:
        found, ends = tokenizer.encode(form)
        assert (found.tolist(), ends.tolist()) == (ids.tolist(), offsets.tolist())


@pytest.mark.parametrize("backend", ["reference", "fast"])
@pytest.mark.parametrize("nothing", [[], pa.array([], pa.large_string()), pa.array([]), [""]])
def test_nothing_in_is_nothing_out(backend: Any, nothing: Any) -> None:
    ids, offsets = opened("gpt2", backend).encode(nothing)
    assert ids.tolist() == []
    assert offsets.tolist() == [0] * (len(nothing) + 1)
    assert (ids.dtype, offsets.dtype) == (np.uint32, np.int64)


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["a", "b\ud800"], "text 1 has half a surrogate pair at character 1"),
        ([b"a", b"ab\xff"], "text 1 is not UTF-8 at byte 2"),
        (pa.array([b"a", b"\xe2\x82"]), "text 1 is not UTF-8 at byte 0"),
        (pa.array(["a", None]), "text 1 is null"),
        (["a", None], "text 1 is a NoneType"),
        (["a", b"b"], "text 1 is a bytes"),
        (pa.array([1, 2]), "texts are int64, expected strings"),
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", ["reference", "fast"])
def test_what_is_no_text_is_refused_with_its_place(backend: Any, texts: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        opened("gpt2", backend).encode(texts)


def test_one_text_and_unknown_options_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"pass \[text\]"):
        opened("gpt2").encode("one text")
    with pytest.raises(ConfigError, match="specials is 'text' or 'parse'"):
        opened("gpt2").encode(["a"], specials="all")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="backend is"):
        open_tokenizer(gpt2_like(), backend="quick")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="threads"):
        open_tokenizer(gpt2_like(), threads=0)


def test_ids_past_the_vocabulary_do_not_decode() -> None:
    tokenizer = opened("gpt2")
    assert tokenizer.decode([]) == ""
    with pytest.raises(OutOfBounds, match="id 3001 is past"):
        tokenizer.decode([1, 3001])
    with pytest.raises(ConfigError, match="whole numbers"):
        tokenizer.decode([0.5])
    with pytest.raises(ConfigError, match="whole numbers"):
        tokenizer.decode([-1])


# ----------------------------------------------------------------------------- choosing the backend


def with_another_end_of_text() -> Path:
    """A tokenizer whose newline and spaces at the end gigatoken 0.10.0 keeps together, wrongly."""
    content, split = content_of(gpt2_like()), content_of(FAMILIES["cl100k"]())["pre_tokenizer"]
    regex = split["pretokenizers"][0]["pattern"]
    regex["Regex"] = regex["Regex"].replace(r"\s*[\r\n]+|", r"\s*[\r\n]|")
    content["pre_tokenizer"] = split
    return with_files(gpt2_like(), "differs", tokenizer=content)


def test_auto_takes_the_fast_backend_where_it_agrees() -> None:
    assert open_tokenizer(gpt2_like()).backend == "gigatoken"


def test_auto_falls_back_with_one_line_for_a_kind_that_is_not_known() -> None:
    with pytest.warns(UserWarning, match='slower backend: .*model type "Unigram"') as caught:
        assert open_tokenizer(FAMILIES["unigram"]()).backend == "tokenizers"
    assert "\n" not in str(caught[0].message)
    with pytest.raises(ConfigError, match="Unigram"):
        open_tokenizer(FAMILIES["unigram"](), backend="fast")


def test_auto_falls_back_naming_the_first_text_that_differs() -> None:
    folder = with_another_end_of_text()
    with pytest.warns(UserWarning, match=r"different ids for 'a\\n    '"):
        tokenizer = open_tokenizer(folder)
    assert tokenizer.backend == "tokenizers"


def test_the_sample_is_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    import penstock.text.tokenizer as module

    folder = with_another_end_of_text()
    monkeypatch.setattr(module, "hard_set", lambda tokens: ["easy"])
    assert open_tokenizer(folder).backend == "gigatoken"
    with pytest.warns(UserWarning, match="different ids"):
        assert open_tokenizer(folder, sample=["ok", "x\n    "]).backend == "tokenizers"


def test_auto_falls_back_where_the_fast_backend_panics(monkeypatch: pytest.MonkeyPatch) -> None:
    # What Rust raises in a panic is called so, and is no Exception.
    panic = type("PanicException", (BaseException,), {})

    class Backend:
        def encode_batch(self, texts: object, *, parallel: bool) -> None:
            raise panic("index out of range")

    gigatoken = pytest.importorskip("gigatoken.gigatoken_rs")
    monkeypatch.setattr(gigatoken, "load_hf_json", lambda content: Backend())
    with pytest.warns(UserWarning, match="gigatoken broke down"):
        assert open_tokenizer(gpt2_like()).backend == "tokenizers"


def test_without_gigatoken_auto_falls_back_and_fast_says_how_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import sys

    from penstock.errors import MissingExtra

    monkeypatch.setitem(sys.modules, "gigatoken.gigatoken_rs", None)
    with pytest.warns(UserWarning, match="gigatoken is not installed: pip install"):
        assert open_tokenizer(gpt2_like()).backend == "tokenizers"
    with pytest.raises(MissingExtra, match=r"pip install 'penstock\[fast\]'"):
        open_tokenizer(gpt2_like(), backend="fast")


# ----------------------------------------------------------------------- what the files have to say


def test_a_post_processor_adds_no_bos_and_truncation_cuts_nothing() -> None:
    folder = FAMILIES["llama3"]()
    assert huggingface(folder).encode("hello").ids[0] == opened("llama3").bos_id
    content = content_of(folder)
    content["truncation"] = {
        "direction": "Right",
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    content["model"]["dropout"] = 0.5
    folder = with_files(folder, "cut", tokenizer=content)
    wanted = opened("llama3").encode(["hello " * 20])[0].tolist()
    assert opened("llama3").bos_id not in wanted
    for backend in ("reference", "fast"):
        assert open_tokenizer(folder, backend=backend).encode(["hello " * 20])[0].tolist() == wanted


def test_the_names_and_the_template_come_from_the_config() -> None:
    tokenizer = opened("qwen")
    assert tokenizer.special_tokens_map == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    assert (tokenizer.eos_id, tokenizer.bos_id, tokenizer.pad_id) == (3002, None, 3000)
    assert tokenizer.vocab_size == 3008
    assert tokenizer.chat_template is not None
    assert "im_start" in tokenizer.chat_template
    assert set(tokenizer.specials) == {
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<|vision_start|>",
    }


def test_generation_config_states_what_the_others_leave_out() -> None:
    folder = with_files(
        gpt2_like(), "gen", tokenizer_config={}, generation_config={"eos_token_id": [3000, 5]}
    )
    assert open_tokenizer(folder, backend="reference").eos_id == 3000
    broken = with_files(
        gpt2_like(), "gen2", tokenizer_config={}, generation_config={"eos_token_id": "x"}
    )
    with pytest.raises(DataError, match="eos_token_id"):
        open_tokenizer(broken)


def test_of_several_chat_templates_the_default_is_taken_and_jinja_files_win() -> None:
    both = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    folder = with_files(gpt2_like(), "templates", tokenizer_config={"chat_template": both})
    assert open_tokenizer(folder, backend="reference").chat_template == "D"
    (folder / "chat_template.jinja").write_text("J")
    assert open_tokenizer(folder, backend="reference").chat_template == "J"
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": both[:1]}))
    with pytest.raises(DataError, match=r"\['tool_use'\], and none of them is 'default'"):
        open_tokenizer(folder)


def test_the_hash_is_of_what_decides_ids_and_of_nothing_else() -> None:
    folder = gpt2_like()
    content = content_of(folder)
    wanted = opened("gpt2").content_hash
    same = {**dict(reversed(content.items())), "decoder": None}
    same["model"] = {
        **content["model"],
        "merges": [" ".join(pair) for pair in content["model"]["merges"]],
    }
    copy = with_files(folder, "same", tokenizer=same, tokenizer_config={})
    assert open_tokenizer(copy, backend="reference").content_hash == wanted
    for change in ("merge", "special", "regex"):
        other = json.loads(json.dumps(content))
        if change == "merge":
            other["model"]["merges"].pop()
        elif change == "special":
            other["added_tokens"][0]["special"] = False
        else:
            other["pre_tokenizer"]["add_prefix_space"] = True
        copy = with_files(folder, change, tokenizer=other, tokenizer_config={})
        assert open_tokenizer(copy, backend="reference").content_hash != wanted, change


# ----------------------------------------------------------------------------------------- refusals


def test_missing_and_damaged_files_are_named_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(MissingData, match=r"neither a tokenizer\.json nor a folder"):
        open_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab"')
    with pytest.raises(DataError, match=r"tokenizer\.json cannot be read as JSON"):
        open_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"model": {"type": "Bigram", "vocab": {"a": 0}}},
            "model of type 'Bigram', and the types known",
        ),
        ({"model": {"type": "BPE", "vocab": {"a": 2**32}}}, r"id 4294967296, and ids are from 0"),
        ({"model": {"type": "BPE", "vocab": {"a": -1}}}, "id -1"),
        ({"model": {"type": "BPE", "vocab": {"a": 0}}}, "cannot be opened by tokenizers"),
        (
            {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}},
            "cannot be opened by tokenizers",
        ),
        ({"model": {"vocab": {"a": 0}, "merges": ["a b c"]}}, "merges that are not pairs"),
        ({"model": {"vocab": {"a": 0}, "merges": [7]}}, "merges that are not pairs"),
        (
            {"added_tokens": [{"id": 5000, "content": "<gap>", "special": False}]},
            "'<gap>' is 5000, and opened it becomes 3000",
        ),
    ],
    ids=str,
)
def test_a_tokenizer_that_cannot_be_is_refused_in_one_line(
    change: dict[str, Any], words: str
) -> None:
    content = {**content_of(gpt2_like()), **change}
    folder = with_files(gpt2_like(), "broken", tokenizer=content, tokenizer_config={})
    with pytest.raises(DataError, match=words) as caught:
        open_tokenizer(folder)
    assert "\n" not in str(caught.value)


def test_a_bos_that_is_no_token_is_named_with_its_file() -> None:
    folder = with_files(gpt2_like(), "bos", tokenizer_config={"bos_token": "<nowhere>"})
    with pytest.raises(DataError, match="names '<nowhere>' as BOS"):
        open_tokenizer(folder)


# ------------------------------------------------------------------------------------------ the Hub


def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the Hub, and no network."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def test_a_name_of_the_hub_opens_from_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = hub_cache(tmp_path, monkeypatch) / "models--acme--small"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    for file in sorted(gpt2_like().iterdir()):
        (snapshot / file.name).write_bytes(file.read_bytes())
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    tokenizer = open_tokenizer("acme/small", backend="reference")
    assert (tokenizer.name, tokenizer.eos_id) == ("acme/small", 3000)


def test_a_name_of_the_hub_that_cannot_be_had_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub_cache(tmp_path, monkeypatch)
    with pytest.raises(
        MissingData, match="acme/none is no file or folder here, and from the Hub"
    ) as e:
        open_tokenizer("acme/none")
    assert "\n" not in str(e.value)
