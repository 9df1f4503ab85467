"""Records of every recipe: their keys, their lengths, and why some documents make none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.prepare.support import Adapter, chatml, llama3, mistral, ragged, talk

from penstock.errors import ConfigError
from penstock.prepare import Built, Dropped, MaskBuilder, PipelineConfig, recipe
from penstock.store import ShardWriter, open_store

TEXT = {"field": "text", "action": "train"}


def built(builder: MaskBuilder, record: Any) -> dict[str, Any]:
    [found] = builder.build([record])
    assert isinstance(found, Built), found
    assert list(found.values) == list(builder.keys)
    return found.values


def dropped(builder: MaskBuilder, record: Any) -> Dropped:
    [found] = builder.build([record])
    assert isinstance(found, Dropped), found
    return found


def with_limits(name: str, **limits: Any) -> PipelineConfig:
    values = recipe(name).to_dict()  # type: ignore[arg-type]
    return PipelineConfig.from_dict(
        {**values, "preprocessing": {**values["preprocessing"], **limits}}
    )


GROUP = {
    "prompt": talk("What is 2+2?"),
    "responses": ["4", "", "It is four.\n"],
    "rewards": [1, 0.3, 1e-3],
}
PAIR = {"chosen": talk("Hi", "Hello!"), "rejected": talk("Hi", "Go away.")}


# ------------------------------------------------------------------ each recipe


def test_grpo_keeps_fractions_and_empty_responses() -> None:
    tokenizer = llama3()
    values = built(MaskBuilder(recipe("grpo"), tokenizer), GROUP)
    assert tokenizer.decode(values["prompts"]).count("<|begin_of_text|>") == 1
    assert [tokenizer.decode(ids) for ids in values["responses"]] == GROUP["responses"]
    assert [mask.tolist() for mask in values["masks"]] == [
        [True] * len(r) for r in values["responses"]
    ]
    assert values["rewards"].dtype == np.float32
    np.testing.assert_array_equal(values["rewards"], np.float32([1, 0.3, 1e-3]))


def test_a_single_reward_is_a_group_of_one() -> None:
    builder = MaskBuilder(recipe("grpo"), chatml())
    values = built(builder, {**GROUP, "responses": ["4"], "rewards": 0.9})
    assert values["rewards"].tolist() == [np.float32(0.9)]


@pytest.mark.parametrize(
    ("rewards", "words"),
    [
        ([1.0], "rewards are 1 for 3 responses"),
        ([1.0, "0.3", 1], "rewards holds text, not a number"),
        ([True, 1, 1], "true or false, not a number"),
        ([1.0, None, 1], "null, not a number"),
        ([1.0, float("nan"), 1], "not finite or too large"),
        ([1.0, 1e300, 1], "too large"),
        ([1.0, 10**400, 1], "too large"),
        ({}, "an object, not a number"),
        (None, "rewards is null"),
    ],
)
def test_rewards_that_are_no_numbers_are_rejected(rewards: Any, words: str) -> None:
    found = dropped(MaskBuilder(recipe("grpo"), chatml()), {**GROUP, "rewards": rewards})
    assert found.rejected
    assert words in found.reason


def test_dpo_sides_share_nothing() -> None:
    tokenizer = chatml()
    builder = MaskBuilder(recipe("dpo"), tokenizer)
    values = built(builder, PAIR)
    for key, answer in (("chosen", "Hello!"), ("rejected", "Go away.")):
        mask = values[f"{key}_mask"]
        assert len(mask) == len(values[key])
        assert tokenizer.decode(values[key][mask]) == f"{answer}<|im_end|>"
    for key in PAIR:
        found = dropped(builder, {**PAIR, key: []})
        assert (found.rule, found.reason) == ("empty", f"rejected: {key} has no messages")
        found = dropped(builder, {**PAIR, key: talk("Hi")})
        assert found.reason == f"rejected: no trained token in {key}"


def test_instructions_mask_the_prompt_and_train_the_response() -> None:
    tokenizer = llama3()
    values = built(
        MaskBuilder(recipe("instruct"), tokenizer), {"prompt": "Hi", "response": "Hello"}
    )
    ids, mask = values["sequence"], values["loss_mask"]
    assert tokenizer.decode(ids[~mask]) == "<|begin_of_text|>Hi"
    assert tokenizer.decode(ids[mask]) == "Hello"
    assert mask.dtype == np.bool_


def test_an_empty_prompt_is_nothing_and_an_empty_response_is_rejected() -> None:
    builder = MaskBuilder(recipe("instruct"), chatml())
    assert built(builder, {"prompt": "", "response": "Hello"})["loss_mask"].all()
    assert dropped(builder, {"prompt": "Hi", "response": ""}).rule == "no_trained_token"


def test_special_tokens_of_a_text_take_its_action() -> None:
    sections = [{**TEXT, "add_special_tokens": True}, {"field": "more", "action": "mask"}]
    config = PipelineConfig.from_dict({"input": {"sections": sections}})
    values = built(MaskBuilder(config, llama3()), {"text": "Hi", "more": "Hello"})
    assert values["loss_mask"][0]
    assert not values["loss_mask"][-1]


def test_plain_text_has_no_mask_and_ends_with_eos() -> None:
    tokenizer = llama3()
    builder = MaskBuilder(with_limits("pretrain", min_chars=0), tokenizer)
    assert builder.plain_text == "text"
    values = built(builder, {"text": "hello world"})
    assert tokenizer.decode(values["sequence"]) == "<|begin_of_text|>hello world<|end_of_text|>"


def test_where_bos_is_eos_a_document_has_it_once() -> None:
    tokenizer = llama3()
    tokenizer.bos_id = tokenizer.eos_id
    builder = MaskBuilder(with_limits("pretrain", min_chars=0), tokenizer)
    values = built(builder, {"text": "hello world"})
    assert tokenizer.decode(values["sequence"]) == "hello world<|end_of_text|>"


def test_lists_of_conversations_are_nested_too() -> None:
    sections = [{"field": "chats", "action": "$role", "template": True}]
    sources = {"chats": {"sections": sections, "list_field": True}}
    config = PipelineConfig.from_dict(
        {"input": {"sources": sources}, "mask": {"assistant": "train"}}
    )
    tokenizer = llama3()
    builder = MaskBuilder(config, tokenizer)
    values = built(builder, {"chats": [talk("Hi", "Hello"), talk("And?")]})
    assert builder.keys["chats_mask"].nested
    assert [mask.any() for mask in values["chats_mask"]] == [True, False]
    assert all(ids[0] == tokenizer.bos_id for ids in values["chats"])


@pytest.mark.parametrize(
    ("name", "record"),
    [
        ("chat", {"messages": talk("Hi", "Hello")}),
        ("instruct", {"prompt": "Hi", "response": "Hello"}),
        ("pretrain", {"text": "hello world " * 9}),
        ("dpo", PAIR),
        ("grpo", GROUP),
    ],
)
def test_records_can_be_written_with_the_keys_that_the_builder_names(
    name: Any, record: dict[str, Any], tmp_path: Path
) -> None:
    tokenizer = chatml()
    builder = MaskBuilder(recipe(name), tokenizer)
    values = built(builder, record)
    with ShardWriter(tmp_path / "out", builder.keys, vocab_size=tokenizer.vocab_size) as writer:
        writer.append(values)
    store = open_store(tmp_path / "out")
    assert set(store.keys) == set(values)
    record = store.record(0, list(values))
    for key, value in values.items():
        assert isinstance(record[key], list) == isinstance(value, list)
        for found, expected in zip(record[key], value, strict=True):
            np.testing.assert_array_equal(found, expected)
    if name == "grpo":
        assert store.dtype("rewards") == np.float32


def test_dtypes_are_those_of_the_recipe() -> None:
    values = {
        **recipe("grpo").to_dict(),
        "output": {"dtype": {"rewards": "float64", "masks": "uint8"}},
    }
    builder = MaskBuilder(PipelineConfig.from_dict(values), chatml())
    assert built(builder, GROUP)["rewards"].tolist() == [1, 0.3, 1e-3]
    assert builder.keys["masks"].dtype == "uint8"
    values["output"] = {"dtype": {"prompts": "uint8"}}
    with pytest.raises(ConfigError, match="too small for a vocabulary"):
        MaskBuilder(PipelineConfig.from_dict(values), chatml())


# ------------------------------------------------------------------ limits


def test_what_is_cut_is_counted_and_the_start_is_kept() -> None:
    whole = MaskBuilder(recipe("chat"), chatml()).build([{"messages": talk("Hi", "Hello " * 50)}])[
        0
    ]
    cut = MaskBuilder(with_limits("chat", max_seq_len=20), chatml()).build(
        [{"messages": talk("Hi", "Hello " * 50)}]
    )[0]
    assert isinstance(whole, Built)
    assert isinstance(cut, Built)
    total = len(whole.values["sequence"])
    assert (whole.tokens_in, whole.truncated) == (total, 0)
    assert (cut.tokens_in, cut.truncated) == (total, total - 20)
    for key in ("sequence", "loss_mask"):
        np.testing.assert_array_equal(cut.values[key], whole.values[key][:20])


def test_a_record_whose_trained_tokens_are_all_cut_is_rejected_with_the_limit() -> None:
    builder = MaskBuilder(with_limits("chat", max_seq_len=10), chatml())
    found = dropped(builder, {"messages": talk("a long story about dragons and knights", "Sure")})
    assert found.reason == "rejected: no trained token within max_seq_len = 10"


@pytest.mark.parametrize(
    ("text", "rule", "rejected"),
    [
        ("short", "min_chars", False),
        ("x" * 101, "max_chars", False),
        (" \n\t\u3000" * 5, "empty", False),
    ],
)
def test_plain_texts_are_filtered_by_rules(text: str, rule: str, rejected: bool) -> None:
    builder = MaskBuilder(with_limits("pretrain", min_chars=10, max_chars=100), chatml())
    found = dropped(builder, {"text": text})
    assert (found.rule, found.rejected, found.reason) == (rule, rejected, f"filtered: {rule}")


def test_limits_of_characters_are_for_plain_text_alone() -> None:
    config = with_limits("instruct", min_chars=1000, max_chars=1000)
    assert built(MaskBuilder(config, chatml()), {"prompt": "Hi", "response": "Hello"})


texts = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=12), max_size=8)


@given(texts, st.booleans(), st.booleans(), st.sampled_from([None, 1, 2, 5]), st.integers(0, 4))
def test_the_way_of_plain_text_makes_the_same_records(
    found: list[str], bos: bool, eos: bool, limit: int | None, least: int
) -> None:
    tokenizer: Adapter = llama3()
    section = {**TEXT, "add_special_tokens": bos, "append_eos": eos}
    limits = {"max_seq_len": limit, "min_chars": least, "max_chars": 10}
    config = PipelineConfig.from_dict({"input": {"sections": [section]}, "preprocessing": limits})
    builder = MaskBuilder(config, tokenizer)
    slow = builder.build([{"text": text} for text in found])
    rules = builder.sift(pa.array(found, pa.large_string()))
    for i, record in enumerate(slow):
        expected = [record.rule] if isinstance(record, Dropped) else []
        assert [rule for rule, mask in rules.items() if mask[i]] == expected
    kept = [text for text, record in zip(found, slow, strict=True) if isinstance(record, Built)]
    ids, offsets, cut = builder.frame(*tokenizer.encode(kept))
    records = [record for record in slow if isinstance(record, Built)]
    expected_ids, expected_offsets = ragged([r.values["sequence"].tolist() for r in records])
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_array_equal(offsets, expected_offsets)
    assert cut == sum(record.truncated for record in records)


# ------------------------------------------------------------------ documents that make no record

BAD = [
    ("chat", 5, "bad_value", "it is a int"),
    ("chat", None, "bad_value", "not an object"),
    ("chat", {}, "missing_field", "messages is missing"),
    ("chat", {"messages": None}, "missing_field", "messages is null"),
    ("chat", {"messages": []}, "empty", "messages has no messages"),
    ("chat", {"messages": "Hi"}, "bad_value", "messages is text, not a list of messages"),
    ("chat", {"messages": {"role": "user"}}, "bad_value", "messages is an object"),
    ("chat", {"messages": ["Hi"]}, "bad_value", "messages[0] is text, not a message"),
    ("chat", {"messages": [{}]}, "template", "chat template refuses"),
    ("chat", {"messages": [{"role": "user", "content": 5}]}, "template", "refuses"),
    ("chat", {"messages": [{"role": "user", "content": None}]}, "template", "refuses"),
    ("chat", {"messages": [{"role": "user", "content": b"x"}]}, "template", "holds a bytes"),
    ("chat", {"messages": talk("Hi")}, "no_trained_token", "no trained token"),
    ("chat", {"messages": talk("\ud800", "Hi")}, "bad_value", "lone surrogate"),
    ("chat", {"messages": [{**talk("Hi")[0], "train": "no"}]}, "bad_value", '"train": \'no\''),
    ("chat", {"messages": talk("Hi", "x"), "tools": "t"}, "bad_value", "tools is text"),
    ("instruct", {"prompt": "Hi"}, "missing_field", "response is missing"),
    ("instruct", {"prompt": 5, "response": "x"}, "bad_value", "prompt is a number, not text"),
    ("instruct", {"prompt": "", "response": "\udfff"}, "bad_value", "at character 0"),
    ("pretrain", {"text": ["x"]}, "bad_value", "text is a list, not text"),
    ("dpo", {"chosen": talk("Hi", "x")}, "missing_field", "rejected is missing"),
    ("grpo", {**GROUP, "responses": "4"}, "bad_value", "responses is text, not a list"),
    ("grpo", {**GROUP, "responses": []}, "empty", "responses is an empty list"),
    ("grpo", {**GROUP, "responses": ["4", 4, "x"]}, "bad_value", "responses[1] is a number"),
    ("grpo", {**GROUP, "responses": ["", "", ""]}, "no_trained_token", "in responses"),
    ("grpo", {**GROUP, "prompt": "Hi"}, "bad_value", "prompt is text, not a list of messages"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "record", "rule", "words"), BAD)
def test_a_document_that_makes_no_record_has_its_reason(
    name: Any, record: Any, rule: str, words: str
) -> None:
    found = dropped(MaskBuilder(recipe(name), chatml()), record)
    assert found.rule == rule
    assert found.rejected
    assert found.reason.startswith("rejected: ")
    assert words in found.reason


def test_one_bad_document_does_not_touch_its_neighbours() -> None:
    builder = MaskBuilder(recipe("chat"), chatml())
    good = {"messages": talk("Hi", "Hello")}
    outcomes = builder.build([good, *(record for name, record, *_ in BAD if name == "chat"), good])
    assert [isinstance(o, Built) for o in (outcomes[0], outcomes[-1])] == [True, True]
    assert all(isinstance(outcome, Dropped) for outcome in outcomes[1:-1])


def test_a_document_nested_without_end_is_rejected() -> None:
    deep: Any = "x"
    for _ in range(100_000):
        deep = [deep]
    chat = [{"role": "user", "content": "Hi", "extra": deep}, *talk("x", first="assistant")]
    assert dropped(MaskBuilder(recipe("chat"), chatml()), {"messages": chat}).rejected


# ------------------------------------------------------------------ what cannot work at all


def test_a_recipe_without_input_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no input"):
        MaskBuilder(PipelineConfig(), chatml())


def test_eos_that_the_tokenizer_has_not_is_refused() -> None:
    tokenizer = mistral()
    tokenizer.eos_id = None
    with pytest.raises(ConfigError, match="ends 'sequence' with EOS"):
        MaskBuilder(recipe("pretrain"), tokenizer)


def test_an_empty_batch_is_empty() -> None:
    assert MaskBuilder(recipe("grpo"), chatml()).build([]) == []
