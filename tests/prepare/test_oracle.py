"""Masks beside those of `transformers`, for templates with generation blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.prepare.support import (
    CHATML,
    CHATML_BLOCKS,
    CHATML_SPECIALS,
    FORGETFUL,
    GEMMA,
    LLAMA3,
    MISTRAL,
    Adapter,
    byte_level,
    talk,
)

from penstock.prepare import Built, MaskBuilder, recipe
from penstock.text.template import ChatTemplate

TIGHT = (  # a blank before the block joins its first word in one token
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}answer: "
    "{% generation %}{{ m.content }}{% endgeneration %}\n{% else %}{{ m.role }}: {{ m.content }}\n"
    "{% endif %}{% endfor %}"
)
THINKING = """\
{%- for m in messages %}
  {%- if m.role == 'assistant' %}
    {{- '<|im_start|>assistant\n' }}
    {%- generation %}
      {%- if m.reasoning_content and loop.last %}
        {{- '<think>' + m.reasoning_content + '</think>' }}
      {%- endif %}
      {%- if m.content is string %}{{ m.content }}{% else %}
        {%- for part in m.content if part.type == 'text' %}{{ part.text }}{% endfor %}
      {%- endif %}{{ '<|im_end|>' }}
    {%- endgeneration %}{{ '\n' }}
  {%- else %}
    {{- '<|im_start|>' + m.role + '\n' + (m.content or '') + '<|im_end|>\n' }}
  {%- endif %}
{%- endfor %}
"""
SPECIALS = ("<s>", *CHATML_SPECIALS)


def oracle(template: str, chat: list[dict[str, Any]], **extra: Any) -> tuple[list[int], list[int]]:
    from transformers import PreTrainedTokenizerFast

    found = PreTrainedTokenizerFast(tokenizer_object=byte_level(SPECIALS), bos_token="<s>")
    out = found.apply_chat_template(
        chat, chat_template=template, return_dict=True, return_assistant_tokens_mask=True, **extra
    )
    return out["input_ids"], out["assistant_masks"]


def ours(template: str, record: dict[str, Any]) -> tuple[list[int], list[int]]:
    tokenizer = Adapter(byte_level(SPECIALS), bos="<s>", chat_template=template)
    [built] = MaskBuilder(recipe("chat"), tokenizer).build([record])
    assert isinstance(built, Built), built
    ids, mask = built.values["sequence"], built.values["loss_mask"]
    if "bos_token" not in template:
        assert ids[0] == tokenizer.bos_id  # that is ours: transformers adds none
        assert not mask[0]
        ids, mask = ids[1:], mask[1:]
    assert tokenizer.bos_id not in np.asarray(ids)[1:]
    return np.asarray(ids).tolist(), np.asarray(mask).astype(int).tolist()


CHATS = {
    "one turn": talk("Hi there", "Hello world"),
    "several turns": talk("Hi", "Hello.", "What is 2+2?", "It is four.", "Thanks", ""),
    "a system prompt": [{"role": "system", "content": "You are helpful."}, *talk("Hi", "Hello")],
    "the assistant begins": talk("Hello", "Hi", "What?", first="assistant"),
    "the user ends": talk("Hi", "Hello", "And?"),
    "other scripts": talk("Привет", "你好, 世界 é ü ñ.", "?", "नमस्ते."),
    "blanks": talk("  Hi \n\n", " \n Hello \t there \n", "x", "  "),
    "empty fields": [
        {"role": "user", "content": "Hi", "tool_calls": None},
        {"role": "assistant", "content": "Hello", "reasoning_content": None, "name": None},
    ],
}


@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS.keys())
@pytest.mark.parametrize(
    "template", [CHATML_BLOCKS, TIGHT, THINKING], ids=["chatml", "tight", "think"]
)
def test_masks_are_those_of_transformers(template: str, chat: list[dict[str, Any]]) -> None:
    assert ours(template, {"messages": chat}) == oracle(template, chat)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_reaches_the_template_under_each_of_its_names(name: str) -> None:
    chat = [*talk("Hi"), {"role": "assistant", "content": "Hello", name: "They greet."}]
    ids, mask = ours(THINKING, {"messages": chat})
    assert (ids, mask) == oracle(THINKING, chat)
    assert "They greet." in byte_level(SPECIALS).decode(ids)


def test_content_of_many_parts_reaches_the_template() -> None:
    parts = [{"type": "text", "text": "Hello"}, {"type": "image"}, {"type": "text", "text": " all"}]
    chat = [*talk("Hi"), {"role": "assistant", "content": parts}]
    assert ours(THINKING, {"messages": chat}) == oracle(THINKING, chat)


def test_tool_calls_and_tools_reach_the_template() -> None:
    template = "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}" + CHATML_BLOCKS
    tools = [{"type": "function", "function": {"name": "sum", "description": "<b> & é"}}]
    call = {"type": "function", "function": {"name": "sum", "arguments": {"of": [1, 2.5]}}}
    chat = [
        *talk("Add."),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "3.5"},
        *talk("It is 3.5.", first="assistant"),
    ]
    ids, mask = ours(template, {"messages": chat, "tools": tools})
    assert (ids, mask) == oracle(template, chat, tools=tools)
    trained = byte_level(SPECIALS).decode([i for i, m in zip(ids, mask, strict=True) if m])
    assert '{"name": "sum", "arguments": {"of": [1, 2.5]}}' in trained


# transformers trains a token beside an empty block, and loses the end of a block whose last
# character is more than one token; so words here are not empty, and of one byte a letter.
words = st.text(st.characters(codec="ascii", exclude_characters="<|>\0"), min_size=1, max_size=20)


@settings(max_examples=40)
@given(st.lists(words, min_size=2, max_size=5), st.sampled_from([CHATML_BLOCKS, TIGHT]))
def test_any_conversation_has_the_masks_of_transformers(turns: list[str], template: str) -> None:
    chat = talk(*turns)
    expected = oracle(template, chat)
    if any(expected[1]):
        assert ours(template, {"messages": chat}) == expected


@pytest.mark.parametrize("turn", ["Hello 😀", "é", "the end of 世界"])
def test_a_last_character_of_many_tokens_is_trained_to_its_end(turn: str) -> None:
    ids, mask = ours(
        CHATML_BLOCKS.replace("{{- '<|im_end|>' }}", ""), {"messages": talk("?", turn)}
    )
    trained = [i for i, m in zip(ids, mask, strict=True) if m]
    assert byte_level(SPECIALS).decode(trained) == turn


# ------------------------------------------------------------------ texts

TEMPLATES = {
    "chatml": CHATML, "blocks": CHATML_BLOCKS, "llama": LLAMA3, "mistral": MISTRAL,
    "gemma": GEMMA, "forgetful": FORGETFUL, "thinking": THINKING, "tight": TIGHT,
    "loops": "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}"
    "{{ loop.index0 }}/{{ loop.length }}{{ m.content }}{{ ', ' if not loop.last }}"
    "{% if loop.index > 2 %}{% break %}{% endif %}{% else %}none{% endfor %}",
    "space": "{% set ns = namespace(n=0, seen='') %}{% for m in messages %}"
    "{% set ns.n = ns.n + 1 %}"
    "{% set ns.seen = ns.seen ~ m.role[:1] ~ loop.index %}{% endfor %}{{ ns.n }}{{ ns.seen }}",
    "macros": "{% macro say(m, mark='*') %}{{ mark * 3 }}{{ m.content | trim | upper }}"
    "{% endmacro %}"
    "{% for m in messages | reverse %}{{ say(m) }}{{ '%5s|%-4d' % (m.role, loop.index) }}"
    "{% endfor %}{% for k, v in messages[0] | dictsort %}{{ k }}={{ v | tojson(indent=2) }}"
    "{% endfor %}",
    "filters": "{{ messages | map(attribute='content') | join('|') }}{{ messages | length }}"
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ none }}{{ 2 ** 5 }}"
    "{{ messages[0].content.split('i')[0].strip() }}{{ undefined_thing }}{{ 'a'.center(9) }}"
    "{% set x %}{{ messages[-1].content }}{% endset %}{{ x | replace('o', '0') | indent(2) }}"
    "{{ messages[0] | items | list }}{{ [1, 2] + [3] }}{{ bos_token }}",
}  # fmt: skip


@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES.keys())
def test_text_is_that_of_transformers(template: str, prompt: bool) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    chat = talk("Hi <there> & 'you'", "Hello", " é\n ", "four")
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    [expected], _ = render_jinja_template(
        [chat], chat_template=template, add_generation_prompt=prompt, **tokens
    )
    found = ChatTemplate(template, tokens).render(chat, add_generation_prompt=prompt)
    assert found.text == expected
