"""A tokenizer's chat template, rendered as `transformers` renders it, in a sandbox that ends.

    >>> template = ChatTemplate(
    ...     "{% for m in messages %}{{ m.role }}: "
    ...     "{% generation %}{{ m.content }}{% endgeneration %};{% endfor %}", {})
    >>> rendered = template.render([{"role": "assistant", "content": "Hi"}])
    >>> rendered.text, rendered.generation
    ('assistant: Hi;', [(11, 13)])

The time a template asks for is the one it was given, or that of its making: two renders of one
conversation are equal. Rendering is for one thread at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols

from penstock.errors import ConfigError, DataError
from penstock.text.sandbox import MAX_CHARS, Meter, Sandbox

if TYPE_CHECKING:
    from jinja2.parser import Parser

# What a template's own code can raise: it does arithmetic, looks things up and calls methods.
_FAILURES = (
    TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError,
    RuntimeError, AssertionError, MemoryError,
)  # fmt: skip
_MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # what Unicode keeps for inside a program
_REASONING = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as text, with the spans of characters that generation blocks wrote.

    `generation` is None where the template has no such blocks.
    """

    text: str
    generation: list[tuple[int, int]] | None


class ChatTemplate:
    """A template, compiled once; `special_tokens` ("bos_token" and so on) are its variables."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], *, now: datetime | None = None
    ) -> None:
        self.source = source
        self._variables = dict(special_tokens)
        moment = now or datetime.now().astimezone()
        self._environment = _environment(moment)
        self._template = _compiled(self._environment, source)
        tree = self._environment.parse(source)
        self.has_generation = any(
            getattr(block.call.node, "name", "") == "_generation"
            for block in tree.find_all(nodes.CallBlock)
            if isinstance(block.call.node, nodes.ExtensionAttribute)
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        **extra: Any,
    ) -> Rendered:
        """The whole conversation; what the template refuses is a DataError with its words.

        >>> picky = ChatTemplate("{{ raise_exception('No messages.') }}", {})
        >>> picky.render([])
        Traceback (most recent call last):
        penstock.errors.DataError: The chat template refuses the conversation: No messages.
        """
        texts: list[str] = []
        chat = [_message(_plain(message, texts), i) for i, message in enumerate(messages)]
        variables = {**self._variables, **{k: _plain(v, texts) for k, v in extra.items()}}
        tool_list, document_list = _plain(tools, texts), _plain(documents, texts)
        self._environment.meter = Meter(chars=MAX_CHARS + 64 * sum(map(len, texts)))
        marks = _unused_marks(texts) if self.has_generation else ("", "")
        self._environment.marks = marks
        pieces = []
        try:
            for piece in self._template.generate(
                messages=chat,
                tools=tool_list,
                documents=document_list,
                add_generation_prompt=add_generation_prompt,
                **variables,
            ):
                self._environment.meter.text(len(piece))
                pieces.append(piece)
        except _FAILURES as error:
            raise DataError(
                f"The chat template refuses the conversation: {_words(error)}"
            ) from error
        text = "".join(pieces)
        if not self.has_generation:
            return Rendered(text, None)
        return _unmarked(text, *marks)


class _Generation(Extension):
    """`{% generation %}`: what the assistant wrote stands between two marks."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own spelling of it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        block = nodes.CallBlock(self.call_method("_generation"), [], [], body)
        return block.set_lineno(line)

    def _generation(self, caller: Callable[[], str]) -> str:
        assert isinstance(self.environment, Sandbox)
        begin, end = self.environment.marks
        return f"{begin}{caller()}{end}"


def _environment(now: datetime) -> Sandbox:
    environment = Sandbox((_Generation, loopcontrols))

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def strftime_now(form: str) -> str:
        return now.strftime(form)

    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    return environment


def _compiled(environment: Sandbox, source: str) -> Template:
    try:
        return environment.compiled(source)
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"The chat template is not valid Jinja, at line {error.lineno}: {error.message}"
        ) from None
    except (*_FAILURES, SyntaxError) as error:
        raise ConfigError(f"The chat template cannot be compiled: {_words(error)}") from None


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as templates expect it: not escaped for HTML, as jinja's own filter would."""
    if isinstance(indent, int) and indent > 64:
        raise TemplateError(f"tojson(indent={indent})")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _words(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    if isinstance(error, RecursionError):
        text = "it calls itself without end"
    return text if len(text) <= 300 else f"{text[:300]}…"


def _plain(value: Any, texts: list[str]) -> Any:
    """A copy in JSON's own types, whose strings are collected: no object's methods get inside.

    >>> _plain({"a": ("b", 1)}, texts := []), texts
    ({'a': ['b', 1]}, ['a', 'b'])
    """
    try:
        return _copied(value, texts)
    except RecursionError:
        raise DataError("The conversation is nested too deeply to be rendered.") from None


def _copied(value: Any, texts: list[str]) -> Any:
    if type(value) is str:
        texts.append(value)
        return value
    if value is None or type(value) in {bool, int, float}:
        return value
    if isinstance(value, Mapping):
        return {_copied(key, texts): _copied(item, texts) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_copied(item, texts) for item in value]
    if isinstance(value, str):
        return _copied(str.__str__(value), texts)
    raise DataError(
        f"The conversation holds a {type(value).__name__}, where text, numbers, lists and "
        "objects are expected."
    )


def _message(message: Any, index: int) -> dict[str, Any]:
    """A message without empty fields, its reasoning under each of the names templates read.

    >>> _message({"role": "assistant", "content": None, "reasoning": "Hm"}, 0)
    {'role': 'assistant', 'reasoning': 'Hm', 'thinking': 'Hm', 'reasoning_content': 'Hm'}
    """
    if not isinstance(message, dict):
        raise DataError(f"Message {index} is a {type(message).__name__}, where an object belongs.")
    found = {key: value for key, value in message.items() if value is not None}
    reasoning = next((found[key] for key in _REASONING if key in found), None)
    if reasoning is not None:
        found.setdefault("thinking", reasoning)
        found["reasoning_content"] = reasoning
    return found


def _unused_marks(texts: list[str]) -> tuple[str, str]:
    free = [mark for mark in _MARKS if not any(mark in text for text in texts)]
    if len(free) < 2:
        raise DataError("The conversation holds every one of the characters U+FDD0 to U+FDEF.")
    return free[0], free[1]


def _unmarked(text: str, begin: str, end: str) -> Rendered:
    """The text without its marks, and where they stood; of blocks in blocks, the outer ones.

    >>> _unmarked("a<bc>d<>", "<", ">")
    Rendered(text='abcd', generation=[(1, 3), (4, 4)])
    """
    spans: list[tuple[int, int]] = []
    pieces: list[str] = []
    at, depth, opened = 0, 0, 0
    for piece in text.replace(end, begin + end).split(begin):
        if piece.startswith(end):
            depth -= 1
            piece = piece[1:]  # noqa: PLW2901 - the mark is not text
            if depth == 0:
                spans.append((opened, at))
        elif pieces:
            opened = at if depth == 0 else opened
            depth += 1
        pieces.append(piece)
        at += len(piece)
        if depth < 0:
            break
    if depth != 0:
        raise DataError("The chat template cuts its own generation blocks apart.")
    return Rendered("".join(pieces), spans)
