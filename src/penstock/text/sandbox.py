"""Jinja's sandbox, with a meter: templates come with downloads, and one of them may never end.

Jinja refuses attributes that lead out of the sandbox, and ranges past 100,000, but not two loops of
100,000 inside each other, `'x' * 10**10`, or text that doubles forty times. So loops, calls and the
texts that operators and outputs make are counted, and a render that passes its budget ends.

    >>> environment = Sandbox()
    >>> template = environment.compiled("{% for i in range(9) %}{{ i }}{% endfor %}")
    >>> environment.meter = Meter(steps=100, chars=1000)
    >>> template.render(), environment.meter.steps
    ('012345678', 74)

What is not counted is bounded by what is: a filter works on values that were paid for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from string import Formatter
from typing import Any

from jinja2 import Environment, Template, nodes
from jinja2.exceptions import SecurityError
from jinja2.filters import FILTERS
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_STEPS = 2_000_000
MAX_CHARS = 1 << 24  # of text made in a render, beside a multiple of what goes in
MAX_WIDTH = 100_000  # of padding: center(10**9) is one call
MAX_BITS = 1 << 16  # of an integer

_PERCENT = re.compile(r"%(?:\([^)]*\))?[-+ #0]*(?:\*|\d{6}|\d*\.(?:\*|\d{6}))")
_BRACES = re.compile(r"\d{6}|\{")
_PADDING = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs"})
_WIDE_FILTERS = ("center", "indent", "batch", "slice", "wordwrap", "truncate", "round")


class Overrun(SecurityError):
    """A template that wants more steps or more text than it may have."""


@dataclass(slots=True)
class Meter:
    """What is left of a render's budget."""

    steps: int = MAX_STEPS
    chars: int = MAX_CHARS

    def step(self, count: int = 1) -> None:
        """Take some steps off the budget."""
        self.steps -= count
        if self.steps < 0:
            raise Overrun(f"it takes more than {MAX_STEPS:,} steps of loops and calls")

    def text(self, count: int) -> None:
        """Take some characters off the budget."""
        self.chars -= count
        if self.chars < 0:
            raise Overrun("it makes more text than a conversation of this size can need")


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment that Hugging Face renders chat templates in, metered."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self, extensions: tuple[Any, ...] = ()) -> None:
        self.meter = Meter()
        self.marks = ("", "")  # around generation blocks
        self._macro_text = 0
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=self._output
        )
        self.globals.pop("lipsum", None)
        for name in _WIDE_FILTERS:
            self.filters[name] = _narrow(FILTERS[name], name)
        self.filters["format"] = _narrow_format
        self.filters["replace"] = self._replaced
        self.filters["join"] = self._listed
        self.filters["_counted"] = self._counted
        self.filters["_joined"] = self._joined

    def compiled(self, source: str) -> Template:
        """The template, its loops and concatenations wrapped in what counts them."""
        tree = self.parse(source)
        for macro in tree.find_all((nodes.Macro, nodes.CallBlock)):
            self._macro_text += _text_in(macro)
        _metered(tree, self)
        return Template.from_code(self, self.compile(tree), self.make_globals(None))

    # ------------------------------------------------------------------ what templates call

    def _output(self, value: Any) -> Any:
        """Every value that is printed passes here."""
        if type(value) is str:
            self.meter.text(len(value))
        return value

    def _counted(self, values: Iterable[Any], text: int) -> Iterator[Any]:
        """The values of a loop, whose body writes this much fixed text."""
        meter = self.meter
        for value in values:
            meter.step()
            meter.text(text)
            yield value

    def _joined(self, values: list[Any]) -> str:
        """The operator `~`."""
        found = [str(value) for value in values]
        self.meter.text(sum(map(len, found)))
        return "".join(found)

    def _replaced(self, value: Any, old: Any, new: Any, count: int | None = None) -> str:
        """The filter `replace`."""
        text, old, new = str(value), str(old), str(new)
        found = text.count(old) if count is None else min(text.count(old), count)
        self.meter.text(len(text) + found * len(new))
        return text.replace(old, new) if count is None else text.replace(old, new, count)

    def _listed(self, value: Any, d: Any = "", attribute: Any = None) -> str:
        """The filter `join`."""
        parts = list(value)
        if attribute is not None:
            parts = [self.getitem(part, attribute) for part in parts]
        found, between = [str(part) for part in parts], str(d)
        self.meter.text(sum(map(len, found)) + len(between) * len(found))
        return between.join(found)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """The operators whose results can be larger than what they are made of."""
        if operator == "*":
            self.meter.text(_repeated(left, right) + _repeated(right, left))
        elif operator == "**":
            if isinstance(left, int) and isinstance(right, int):
                _check_bits(abs(left).bit_length() * abs(right))
        elif operator == "%" and isinstance(left, str):
            _check_format(left)
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, (str, list, tuple)):
            self.meter.text(len(result))
        elif isinstance(result, int):
            _check_bits(result.bit_length())
        return result

    def call(self, context: Any, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Functions, methods and macros; the signature is jinja's, so arguments are passed on."""
        self.meter.step(8)
        self.meter.text(self._macro_text)
        owner = getattr(getattr(called, "__wrapped__", called), "__self__", None)
        if isinstance(owner, str):
            name = getattr(called, "__name__", "")
            if name in _PADDING:
                _check_width(args)
            elif name in {"format", "format_map"}:
                _check_fields(owner)
            elif name == "replace" and len(args) >= 2:
                old, new = str(args[0]), str(args[1])
                self.meter.text(len(owner) + (owner.count(old) * len(new)))
            elif name == "join" and args:
                args = ([str(part) for part in args[0]], *args[1:])
                self.meter.text(sum(map(len, args[0])) + len(owner) * len(args[0]))
        elif isinstance(called, LoopContext) and args:  # a recursive loop, one level down
            args = (self._counted(args[0], 0),)
        result = super().call(context, called, *args, **kwargs)
        if isinstance(result, range):
            self.meter.step(len(result))
        return result


def _metered(tree: nodes.Template, environment: Environment) -> None:
    for loop in list(tree.find_all(nodes.For)):
        text: nodes.Expr = nodes.Const(_text_in(loop))
        counted = nodes.Filter(loop.iter, "_counted", [text], [], None, None)
        loop.iter = counted
    for node in [tree, *tree.find_all(nodes.Node)]:
        for field, value in list(node.iter_fields()):
            if isinstance(value, nodes.Concat):
                setattr(node, field, _join_call(value))
            elif isinstance(value, list):
                value[:] = [_join_call(v) if isinstance(v, nodes.Concat) else v for v in value]
    tree.set_environment(environment)


def _join_call(node: nodes.Concat) -> nodes.Filter:
    listed = nodes.List(node.nodes, lineno=node.lineno)
    return nodes.Filter(listed, "_joined", [], [], None, None, lineno=node.lineno)


def _text_in(node: nodes.Node) -> int:
    """How much fixed text stands in a block, inner loops apart.

    >>> _text_in(Environment().parse("ab{{ x }}{% for y in z %}cd{% endfor %}"))
    2
    """
    count = 0
    for child in node.iter_child_nodes():
        if isinstance(child, nodes.TemplateData):
            count += len(child.data)
        elif not isinstance(child, nodes.For):
            count += _text_in(child)
    return count


def _repeated(values: Any, times: Any) -> int:
    if isinstance(values, (str, list, tuple)) and isinstance(times, int):
        return len(values) * max(times, 0)
    return 0


def _check_bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise Overrun(f"it makes an integer of more than {MAX_BITS:,} bits")


def _check_width(values: Iterable[Any]) -> None:
    if any(isinstance(value, int) and abs(value) > MAX_WIDTH for value in values):
        raise Overrun(f"it pads text to more than {MAX_WIDTH:,} characters")


def _check_format(text: str) -> None:
    if _PERCENT.search(text):
        raise Overrun(f"it formats with a width that is not fixed, or past {MAX_WIDTH:,}")


def _check_fields(text: str) -> None:
    """The same of `str.format`.

    >>> _check_fields('{{"sum": {:>8}}}')
    """
    for _, _, width, _ in Formatter().parse(text):
        if width and _BRACES.search(width):
            raise Overrun(f"it formats with a width that is not fixed, or past {MAX_WIDTH:,}")


def _narrow(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A filter that refuses widths past the limit; its marks for jinja are kept."""

    def checked(*args: Any, **kwargs: Any) -> Any:
        _check_width([*args, *kwargs.values()])
        return function(*args, **kwargs)

    checked.__name__ = name
    checked.__dict__.update(vars(function))
    return checked


def _narrow_format(value: str, *args: Any, **kwargs: Any) -> str:
    _check_format(str(value))
    return str(FILTERS["format"](value, *args, **kwargs))
