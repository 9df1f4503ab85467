"""The recipes that have a name. They are AstrAI's documented ones, but for what `pretrain` adds.

    >>> recipe("instruct").input.sections[1]
    {'field': 'response', 'action': 'train'}

`pretrain` appends EOS and sets no limit of length: documents are cut where rows are packed. To
change one, write `recipe(name).to_file("mine.json")` and edit that.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

from penstock.prepare.config import PipelineConfig
from penstock.prepare.values import choice

Name = Literal["pretrain", "chat", "instruct", "dpo", "grpo"]

_ROLES = {"mask": {"system": "mask", "user": "mask", "assistant": "train"}}


def _conversation(field: str) -> dict[str, Any]:
    return {"sections": [{"field": field, "action": "$role", "template": True}]}


_RECIPES: dict[str, dict[str, Any]] = {
    "pretrain": {
        "input": {"sections": [{"field": "text", "action": "train", "append_eos": True}]},
        "preprocessing": {"max_seq_len": None},
    },
    "chat": {"input": _conversation("messages"), **_ROLES},
    "instruct": {
        "input": {
            "sections": [
                {"field": "prompt", "action": "mask", "add_special_tokens": True},
                {"field": "response", "action": "train"},
            ]
        }
    },
    "dpo": {
        "input": {
            "sources": {"chosen": _conversation("chosen"), "rejected": _conversation("rejected")}
        },
        **_ROLES,
    },
    "grpo": {
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
        **_ROLES,
    },
}


def recipe(name: Name) -> PipelineConfig:
    """The recipe of that name.

    >>> recipe("dpo").input.outputs[1].mask_key
    'rejected_mask'
    """
    return PipelineConfig.from_dict(_RECIPES[choice(name, get_args(Name), "recipe")])
