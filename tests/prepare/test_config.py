"""Recipes: what is documented loads as it stands, and what means nothing is refused by name."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any, get_args

import pytest

from penstock.errors import ConfigError, MissingData
from penstock.prepare import InputConfig, OutputConfig, PipelineConfig, ProcessingConfig, recipe
from penstock.prepare.recipes import Name

CHAT = {
    "input": {"sections": [{"field": "messages", "action": "$role", "template": True}]},
    "mask": {"system": "mask", "user": "mask", "assistant": "train"},
    "mask_default": "mask",
    "preprocessing": {"max_seq_len": 2048},
    "output": {"storage_format": "bin", "dtype": {"loss_mask": "bool"}},
}
INSTRUCT = {
    "input": {
        "sections": [
            {"field": "prompt", "action": "mask", "add_special_tokens": True},
            {"field": "response", "action": "train"},
        ]
    },
    "mask_default": "mask",
    "preprocessing": {"max_seq_len": 2048},
}
PRETRAIN = {
    "input": {"sections": [{"field": "text", "action": "train"}]},
    "preprocessing": {"max_seq_len": 8192, "min_chars": 100},
}
DPO = {
    "input": {
        "sources": {
            key: {"sections": [{"field": key, "action": "$role", "template": True}]}
            for key in ("chosen", "rejected")
        }
    },
    "mask": {"user": "mask", "assistant": "train"},
}
GRPO = {
    "input": {
        "sources": {
            "prompts": {"sections": [{"field": "prompt", "action": "mask", "template": True}]},
            "responses": {
                "sections": [{"field": "responses", "action": "train"}],
                "list_field": True,
                "mask_key": "masks",
            },
            "rewards": {"sections": [{"field": "rewards", "action": "value"}]},
        }
    },
    "mask": {"user": "mask", "assistant": "train"},
}
KEYS = [
    (CHAT, ["sequence", "loss_mask"]),
    (INSTRUCT, ["sequence", "loss_mask"]),
    (PRETRAIN, ["sequence"]),
    (DPO, ["chosen", "chosen_mask", "rejected", "rejected_mask"]),
    (GRPO, ["prompts", "responses", "masks", "rewards"]),
]


def keys(config: PipelineConfig) -> list[str]:
    return [k for o in config.input.outputs for k in (o.key, o.mask_key) if k is not None]


@pytest.mark.parametrize(("values", "expected"), KEYS)
def test_documented_recipes_load_as_they_stand(
    values: dict[str, Any], expected: list[str], tmp_path: Path
) -> None:
    config = PipelineConfig.from_dict(values)
    assert keys(config) == expected
    assert config.input.sections == values["input"].get("sections")
    assert config.input.sources == values["input"].get("sources")
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(values))
    assert PipelineConfig.from_json(path) == config
    assert PipelineConfig.from_json(str(path)) == config
    assert PipelineConfig.from_json(json.dumps(values)) == config
    assert PipelineConfig.from_file(path) == config
    config.to_file(path)
    assert PipelineConfig.from_file(path) == config
    assert PipelineConfig.from_dict(config.to_dict()) == config


def test_toml_says_the_same(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(
        """
        mask = { assistant = "train" }
        [[input.sections]]
        field = "messages"
        action = "$role"
        template = true
        [preprocessing]
        max_seq_len = "none"
        """
    )
    config = PipelineConfig.from_file(path)
    assert config.input == PipelineConfig.from_dict(CHAT).input
    assert config.preprocessing.max_seq_len is None
    assert config.trains("assistant")
    assert not config.trains("tool")


def test_defaults_are_those_of_the_contracts() -> None:
    config = PipelineConfig()
    assert (config.version, config.mask, config.mask_default) == (1, {}, "mask")
    assert (config.input.sections, config.input.sources) == (None, None)
    assert config.preprocessing == ProcessingConfig(
        max_seq_len=2048, min_chars=50, max_chars=2_000_000, max_items=None,
        packing_strategy="simple", max_packed_len=8192, truncation_mode="keep_start",
    )  # fmt: skip
    assert config.output == OutputConfig(
        domain_key=None, storage_format="bin", max_tokens_per_shard=100_000_000, dtype={},
        position_ids_mode="none",
    )  # fmt: skip
    section = {"field": "text", "action": "mask"}
    first, second = InputConfig([section, section]).outputs[0].sections
    assert (first.add_special_tokens, second.add_special_tokens) == (True, False)
    assert not first.template


@pytest.mark.parametrize("name", get_args(Name))
def test_recipes_with_a_name_are_the_documented_ones(name: Name) -> None:
    documented = {"pretrain": 2, "chat": 0, "instruct": 1, "dpo": 3, "grpo": 4}[name]
    assert keys(recipe(name)) == KEYS[documented][1]
    if name != "pretrain":
        assert recipe(name).input == PipelineConfig.from_dict(KEYS[documented][0]).input
    else:
        assert recipe(name).preprocessing.max_seq_len is None
        assert recipe(name).input.outputs[0].sections[0].append_eos


def test_sources_override_sections() -> None:
    config = InputConfig(
        sections=[{"field": "x", "action": "train"}], sources=DPO["input"]["sources"]
    )
    assert [output.key for output in config.outputs] == ["chosen", "rejected"]


def test_a_config_is_frozen_and_shares_nothing_with_what_it_was_made_of() -> None:
    sections = [{"field": "text", "action": "train"}]
    config = InputConfig(sections)
    sections[0]["action"] = "nonsense"
    assert config.sections == [{"field": "text", "action": "train"}]
    with pytest.raises(FrozenInstanceError):
        config.sections = None  # type: ignore[misc]


def changed(values: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    found = json.loads(json.dumps(values))
    *parents, last = path.split("/")
    inner = found
    for part in parents:
        inner = inner[int(part)] if isinstance(inner, list) else inner.setdefault(part, {})
    inner[int(last) if isinstance(inner, list) else last] = value
    return found


WRONG = [
    (CHAT, "inputs", {}, r"unknown key inputs \(meant: input\?\)"),
    (CHAT, "input/section", [], r"unknown key input.section \(meant: sections\?\)"),
    (CHAT, "input/sections/0/feild", "x", r"sections\[0\].feild \(meant: field\?\)"),
    (CHAT, "preprocessing/max_len", 5, r"unknown key preprocessing.max_len \("),
    (CHAT, "output/format", "h5", r"unknown key output.format \("),
    (DPO, "input/sources/chosen/list_fields", True, r"chosen.list_fields \(meant: list_field\?\)"),
    (CHAT, "version", 2, "version must be 1, found 2"),
    (CHAT, "version", True, "version must be 1"),
    (CHAT, "mask", ["assistant"], "mask must map roles to actions"),
    (CHAT, "mask/assistant", "trian", r"mask.assistant .* found 'trian' .*meant: train\?"),
    (CHAT, "mask_default", "$role", "mask_default must be one of train, mask"),
    (CHAT, "input", [], "input must be an object"),
    (CHAT, "input/sections", {}, "at least one section"),
    (CHAT, "input/sections", [], "at least one section"),
    (CHAT, "input/sections/0", "messages", r"sections\[0\] must be an object"),
    (CHAT, "input/sections/0", {"template": True}, "lacks field and action"),
    (CHAT, "input/sections/0/field", 5, "field must be text"),
    (CHAT, "input/sections/0/action", "role", "action must be one of"),
    (INSTRUCT, "input/sections", [{"field": "x", "action": "value"}], "belongs to input.sources"),
    (CHAT, "input/sections/0/template", 1, "template must be true or false"),
    (CHAT, "input/sections/0/template", False, "'\\$role' needs template"),
    (INSTRUCT, "input/sections/1/add_generation_prompt", True, "needs template"),
    (CHAT, "input/sources", {}, "at least one source"),
    (CHAT, "input/sources", {"a b": {}}, "letters, digits"),
    (CHAT, "input/sources", {"a": []}, "must be an object with sections"),
    (DPO, "input/sources/chosen/mask_key", "rejected", "'rejected' is made twice"),
    (GRPO, "input/sources/rewards/list_field", True, "neither list_field nor mask_key"),
    (GRPO, "input/sources/rewards/sections/0/template", True, "without template"),
    (CHAT, "preprocessing/max_seq_len", 0, "max_seq_len must be an integer >= 1"),
    (CHAT, "preprocessing/max_seq_len", "2048", "max_seq_len must be an integer"),
    (CHAT, "preprocessing/max_items", -1, "max_items must be an integer >= 1"),
    (CHAT, "preprocessing/max_items", 1.5, "max_items must be an integer"),
    (CHAT, "preprocessing/min_chars", True, "min_chars must be an integer >= 0"),
    (CHAT, "preprocessing/min_chars", 3_000_000, "no text is that long and that short"),
    (CHAT, "preprocessing/packing_strategy", "bdf", r"found 'bdf' \(str\) \(meant: bfd\?\)"),
    (CHAT, "preprocessing/truncation_mode", "end", "keep_start, keep_end"),
    (CHAT, "output/storage_format", "arrow", "one of bin, h5"),
    (CHAT, "output/domain_key", "", "domain_key must be text"),
    (CHAT, "output/max_tokens_per_shard", 0, "max_tokens_per_shard must be an integer >= 1"),
    (CHAT, "output/position_ids_mode", "reset", "position_ids_mode must be one of"),
    (CHAT, "output/dtype", "bool", "dtype must map keys"),
    (CHAT, "output/dtype/loss_mask", "boolean", "dtype.loss_mask must be one of"),
    (CHAT, "output/dtype/sequence", "float32", "tokens need an integer"),
    (GRPO, "output/dtype", {"rewards": "int32"}, "would cut fractions"),
]


@pytest.mark.parametrize(("values", "path", "value", "words"), WRONG)
def test_what_cannot_be_meant_is_refused_in_one_sentence(
    values: dict[str, Any], path: str, value: Any, words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        PipelineConfig.from_dict(changed(values, path, value), where="mine.json")
    assert str(caught.value).startswith("mine.json: ")
    assert "\n" not in str(caught.value)


def test_files_that_are_no_recipes_are_named(tmp_path: Path) -> None:
    path = tmp_path / "recipe.json"
    with pytest.raises(MissingData, match=r"recipe.json does not exist"):
        PipelineConfig.from_file(path)
    for content, words in (
        (b"{,}", r"recipe.json is not valid JSON: .*\(line 1"),
        (b"[1]", r"recipe.json must be an object"),
        (b"\xff{}", r"not UTF-8, at byte 0"),
        (b'{"mask": {}, "mask": {}}', "'mask' is there twice"),
        (b"[" * 100_000, r"nested too deeply|not valid JSON"),
    ):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=words):
            PipelineConfig.from_file(path)
    path.write_bytes(b"\xef\xbb\xbf{}")
    assert PipelineConfig.from_file(path) == PipelineConfig()
    with pytest.raises(ConfigError, match=r"must end in .json or .toml"):
        PipelineConfig.from_file(tmp_path / "recipe.yaml")
    toml = tmp_path / "recipe.toml"
    toml.write_text("mask = =\n")
    with pytest.raises(ConfigError, match=r"recipe.toml is not valid TOML: .*line 1"):
        PipelineConfig.from_file(toml)


def test_an_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"meant: instruct\?"):
        recipe("instruction")  # type: ignore[arg-type]
