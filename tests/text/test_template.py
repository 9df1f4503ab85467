"""Chat templates: what they may do, and what ends them."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from penstock.errors import ConfigError, DataError
from penstock.text.template import ChatTemplate

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]

HOSTILE = {
    "loops in loops": "{% for a in range(99999) %}"
    "{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a range too long": "{% for a in range(10**9) %}{% endfor %}",
    "one list, many loops": "{% set x = range(9999) | list %}{% for a in x %}{% for b in x %}"
    "{% for c in x %}{% endfor %}{% endfor %}{% endfor %}",
    "a recursive loop": "{% for a in [[1, 2]] recursive %}{{ loop([[1, 2], [3, 4]]) }}{% endfor %}",
    "a macro that calls itself": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "a macro that calls itself twice": "{% macro m(n) %}{% if n %}"
    "{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(40) }}",
    "text times a billion": "{{ 'x' * 10**9 }}",
    "a list times a billion": "{% set x = [1] * 10**10 %}",
    "text that doubles": "{% set ns = namespace(x='xx') %}{% for i in range(60) %}"
    "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "text that is added up": "{% set ns = namespace(x='xx') %}{% for i in range(60) %}"
    "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "text that is replaced": "{% set ns = namespace(x='xx') %}{% for i in range(60) %}"
    "{% set ns.x = ns.x.replace('x', 'xx') %}{% endfor %}",
    "text that is joined": "{% set ns = namespace(x='xx') %}{% for i in range(60) %}"
    "{% set ns.x = ns.x.join([ns.x, ns.x, ns.x]) %}{% endfor %}",
    "a number of many digits": "{{ 9 ** (9 ** 9) }}",
    "numbers that square": "{% set ns = namespace(x=99) %}{% for i in range(60) %}"
    "{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "a wide filter": "{{ 'x' | center(10**9) }}",
    "a wide filter, folded": "{{ 'x' | center(1000000000) }}",
    "a wide method": "{{ 'x'.ljust(10**9) }}",
    "a wide format": "{{ '%999999999d' % 1 }}",
    "a wide format that is given": "{{ '%*d' % (999999999, 1) }}",
    "a wide format method": "{{ '{:999999999}'.format(1) }}",
    "a wide format method that is given": "{{ '{:{}}'.format(1, 999999999) }}",
    "a wide format filter": "{{ '%999999999d' | format(1) }}",
    "wide JSON": "{{ messages | tojson(indent=999999999) }}",
    "output in a macro": "{% macro m() %}{% for i in range(99999) %}" + "x" * 9999 + "{% endfor %}"
    "{% endmacro %}{% set y = m() %}",
    "output in a block": "{% set y %}{% for i in range(99999) %}{{ messages[0].content * 9999 }}"
    "{% endfor %}{% endset %}",
    "output at the top": "{% for i in range(99999) %}" + "x" * 9999 + "{% endfor %}",
    "Python's inside": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "Python's inside by a filter": "{{ (''|attr('__class__')).x }}",
    "Python's inside by format": "{{ '{0.__class__}'.format(messages).__class__.__mro__.x }}",
    "changing what is given": "{{ messages.append(1) }}",
    "a function of the sandbox": "{{ raise_exception.__globals__.x }}",
    "zero": "{{ 1 // 0 }}",
    "wrong types": "{{ 1 + 'x' }}",
    "a missing key": "{{ nothing.at.all }}",
    "an include": "{% include '/etc/passwd' %}",
    "an import": "{% import 'os' as os %}",
    "a date of nothing": "{{ strftime_now(5) }}",
}  # fmt: skip


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_templates_end_with_an_error_of_one_sentence(source: str) -> None:
    with pytest.raises((DataError, ConfigError), match="chat template") as caught:
        ChatTemplate(source, {}).render(CHAT)
    assert len(str(caught.value)) < 400


def test_a_range_past_jinja_s_limit_says_so() -> None:
    with pytest.raises(DataError, match=r"Range too big.*100000"):
        ChatTemplate("{% for a in range(10**6) %}{% endfor %}", {}).render(CHAT)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% for m in messages %}\n{{ m.content }", "not valid Jinja, at line 2"),
        ("{% generation %}", "not valid Jinja"),
        ("{{ x | no_such_filter }}", "No filter named 'no_such_filter'"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "cannot be compiled|not valid"),
        ("{% for a in b %}" * 200 + "{% endfor %}" * 200, "cannot be compiled"),
    ],
)
def test_templates_that_are_no_jinja_are_refused_when_made(source: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ChatTemplate(source, {})


def test_large_conversations_are_no_overrun() -> None:
    text = "x" * 5_000_000
    chat = [{"role": "user", "content": text}, *CHAT * 2000]
    source = "{% for m in messages %}{{ m.role ~ ': ' + m.content | trim + '\n' }}{% endfor %}"
    assert len(ChatTemplate(source, {}).render(chat).text) > len(text) + 2000 * 20


def test_a_budget_is_one_render_s() -> None:
    template = ChatTemplate("{% for a in range(90000) %}{% endfor %}done", {})
    assert {template.render(CHAT).text for _ in range(40)} == {"done"}


def test_the_time_is_that_of_the_making() -> None:
    now = datetime(2024, 7, 26, tzinfo=UTC)
    source = "{{ strftime_now('%d %b %Y') }}"
    assert ChatTemplate(source, {}, now=now).render(CHAT).text == "26 Jul 2024"
    template = ChatTemplate("{{ strftime_now('%s.%f') }}", {})
    assert template.render(CHAT) == template.render(CHAT)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% generation %}a{% endgeneration %}b", [(0, 1)]),
        (
            "{% macro m() %}{% generation %}a{% endgeneration %}{% endmacro %}x{{ m() }}y{{ m() }}",
            [(1, 2), (3, 4)],
        ),
        (
            "{% set x %}.{% generation %}a{% endgeneration %}{% endset %}{{ x }}{{ x }}",
            [(1, 2), (3, 4)],
        ),
        ("{% generation %}a{% generation %}b{% endgeneration %}{% endgeneration %}", [(0, 2)]),
        ("a{% if false %}{% generation %}{% endgeneration %}{% endif %}", []),
        ("a{% generation %}{% endgeneration %}", [(1, 1)]),
        ("generation", None),
    ],
)  # fmt: skip
def test_generation_blocks_are_found_wherever_they_are_written(
    source: str, expected: list[tuple[int, int]] | None
) -> None:
    rendered = ChatTemplate(source, {}).render(CHAT)
    assert rendered.generation == expected
    assert not any("\ufdd0" <= c <= "\ufdef" for c in rendered.text)


def test_marks_in_a_conversation_are_left_alone() -> None:
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    text = "\ufdd0a\ufdd1"
    rendered = ChatTemplate(source, {}).render([{"role": "assistant", "content": text}])
    assert (rendered.text, rendered.generation) == (text, [(0, 3)])
    every = "".join(chr(code) for code in range(0xFDD0, 0xFDF0))
    with pytest.raises(DataError, match=r"U\+FDD0"):
        ChatTemplate(source, {}).render([{"role": "assistant", "content": every}])


def test_a_block_that_is_cut_apart_is_refused() -> None:
    source = "{% set x %}{% generation %}a{% endgeneration %}{% endset %}{{ x[1:] }}"
    with pytest.raises(DataError, match="generation blocks apart"):
        ChatTemplate(source, {}).render(CHAT)


def test_special_tokens_are_variables() -> None:
    template = ChatTemplate("{{ bos_token }}|{{ eos_token }}|{{ x }}", {"bos_token": "<s>"})
    assert template.render(CHAT, x=5).text == "<s>||5"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ('x' * 10000)|replace('x', 'y' * 10000) }}",
        "{% for m in range(100) %}{% set z = (['x' * 100000] * 1000)|join %}{% endfor %}",
    ],
)
def test_filters_that_make_text_are_metered_as_methods_are(source: str) -> None:
    with pytest.raises(DataError, match="more text than a conversation"):
        ChatTemplate(source, {}).render([{"role": "user", "content": "hi"}])


def test_the_filters_replace_and_join_do_as_jinjas_do() -> None:
    source = "{{ 'a-b-c'|replace('-', '+', 1) }} {{ [1, 2]|join(', ') }} {{ messages|join('/', attribute='role') }}"  # noqa: E501
    messages = [{"role": "user", "content": ""}, {"role": "bot", "content": ""}]
    assert ChatTemplate(source, {}).render(messages).text == "a+b-c 1, 2 user/bot"
