r"""One JSON document at a time: decoding many quickly, and saying what is wrong with one.

    decode_all([b'{"text": "a"}', b"", b"{"], decode)  →  kept [0], [{"text": "a"}], [(2, reason)]

The quick way decodes all in one go and is taken nearly always; only where something is wrong are
they looked at one by one. Refused are: what is not JSON (NaN and raw control characters among it),
invalid UTF-8 anywhere, half of a surrogate pair (no character, and no UTF-8 can hold it), nesting
deeper than Python's stack, numbers that overflow where they are wanted, another type than asked
for. Of a key given twice the last counts; `\u0000` and U+2028 are text like any other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.text.arrow import strings

if TYPE_CHECKING:
    import pyarrow as pa

Item = bytes | msgspec.Raw
Decode = Callable[[Item], Any]
Bad = tuple[int, str]  # which item, and why

_WRONG = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_ANY = msgspec.json.Decoder()
# Escapes one after another, so that `\\ud800` (a backslash, then letters) is not taken for one.
_SURROGATE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb"|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)
_BYTE = re.compile(r"\(byte (\d+)\)")


def text_decoder(field: str) -> Decode:
    """Decodes one text field, as `.text`, and the id, and passes over the rest.

    >>> row = text_decoder("body")(b'{"id": 7, "body": "abc", "more": [1, 2]}')
    >>> row.text, row.id
    ('abc', 7)
    """
    fields: list[Any] = [("text", str)]
    if field != "id":
        fields.append(("id", Any, None))
    names = {"text": field} if field == "id" else {"text": field, "id": "id"}
    struct = msgspec.defstruct("Row", fields, rename=names, gc=False)
    return msgspec.json.Decoder(struct).decode


def record_decoder() -> Decode:
    """Decodes whole documents, which are objects."""
    return msgspec.json.Decoder(dict[str, Any]).decode


def decode_all(
    items: Sequence[Item], decode: Decode, *, utf8: bool, field: str | None = None
) -> tuple[list[int] | None, list[Any], list[Bad]]:
    """Which were decoded (None: all), what they are, and what is wrong with the others.

    `utf8` says that all of the input is known to be; blank items count as nothing.

    >>> decode_all([b"{}", b" ", b"["], record_decoder(), utf8=True)
    ([0], [{}], [(2, 'not JSON: it ends too early')])
    """
    if utf8:
        try:
            return None, [decode(item) for item in items], []
        except _WRONG:
            pass  # found again below, one by one
    kept, rows, bad = [], [], []
    for i, item in enumerate(items):
        raw = bytes(item)
        try:
            if not utf8:
                raw.decode()
            row = decode(raw)
        except _WRONG as error:
            if raw.strip():
                bad.append((i, reason(error, raw, field)))
            continue
        kept.append(i)
        rows.append(row)
    return kept, rows, bad


def reason(error: Exception, raw: bytes, field: str | None = None) -> str:
    r"""What is wrong with a document, in words.

    >>> raw = b'{"text": "\\ud83d"}'
    >>> try: _ANY.decode(raw)
    ... except msgspec.DecodeError as error: print(reason(error, raw))
    half of a surrogate pair, \ud83d, which is no character
    """
    if isinstance(error, RecursionError):
        return "nested too deeply"
    try:
        raw.decode()
    except UnicodeDecodeError as wrong:
        utf16 = raw.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\x00" in raw[:4]
        hint = " (UTF-16, it seems)" if utf16 else ""
        return f"invalid UTF-8 at its byte {wrong.start}{hint}"
    if isinstance(error, msgspec.ValidationError):
        return _mismatch(error, raw, field)
    for escape in _SURROGATE.finditer(raw):
        if escape[1]:
            return f"half of a surrogate pair, \\{escape[1].decode()}, which is no character"
    where = _BYTE.search(str(error))
    if where and raw[int(where[1]) :].lstrip(b"-").startswith((b"NaN", b"Infinity")):
        return f"not JSON: NaN and Infinity are not, at its byte {where[1]}"
    what = str(error).removeprefix("JSON is malformed: ")
    what = what.replace("Input data was truncated", "it ends too early")
    return f"not JSON: {what}"


def _mismatch(error: Exception, raw: bytes, field: str | None) -> str:
    try:
        value = _ANY.decode(raw)
    except msgspec.ValidationError as wrong:  # a number beyond all bounds
        return f"{wrong}"
    except _WRONG as wrong:  # more is wrong than its type
        return reason(wrong, raw)
    if not isinstance(value, dict):
        return f"{_named(value)}, where an object was expected"
    if field is None:
        return f"{error}"
    if field not in value:
        has = ", ".join(map(repr, list(value)[:8])) or "none"
        return f"no field {field!r}; its fields: {has}"
    if not isinstance(value[field], str):
        return f"{field!r} is {_named(value[field])}, where text was expected"
    return f"{error}"


def _named(value: object) -> str:
    """A value's type in JSON's words.

    >>> _named(True), _named([1]), _named(None)
    ('a boolean', 'a list', 'null')
    """
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "text"
        case list():
            return "a list"
    return "an object"


def ids_of(values: Sequence[Any]) -> pa.LargeStringArray | None:
    """Ids as strings: text as it is, all else as its JSON; None where there are none at all.

    >>> ids_of(["a", 7, None]).to_pylist(), ids_of([None, None])
    (['a', '7', None], None)
    """
    if all(value is None for value in values):
        return None
    texts = [value if value is None or isinstance(value, str) else _json(value) for value in values]
    return strings(texts)


def _json(value: object) -> str | None:
    if isinstance(value, bytes):  # of a Parquet file: the bytes of a UUID, say
        return value.hex()
    try:
        value = msgspec.to_builtins(value, enc_hook=str)  # dates are text
        return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    except RecursionError:  # nested to the edge of what can be read: no use as an id
        return None


# ------------------------------------------------------------------------- a list that is damaged

_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"|["\[\]{},]', re.DOTALL)


def split_list(data: bytes) -> tuple[list[bytes], str | None, bytes]:
    """The elements of a list in which something is wrong, so that the others are not lost with it.

    Then what is wrong with the list itself, if anything is, and where that begins.

    >>> split_list(b'[{"a": "]"}, oops, 3]')
    ([b'{"a": "]"}', b'oops', b'3'], None, b'')
    >>> split_list(b'[1, {"a": ')
    ([b'1'], 'the list does not end', b' {"a": ')
    """
    items: list[bytes] = []
    begin = data.index(b"[") + 1
    depth = 0
    for token in _TOKEN.finditer(data):
        match token[0]:
            case b"[" | b"{":
                depth += 1
            case b"]" | b"}":
                depth -= 1
                if depth == 0:
                    last = data[begin : token.start()].strip()
                    if last or items:
                        items.append(last or b",")
                    rest = data[token.end() :]
                    wrong = "something follows the end of the list" if rest.strip() else None
                    return items, wrong, rest
            case b"," if depth == 1:
                items.append(data[begin : token.start()].strip() or b",")
                begin = token.end()
            case b'"':  # a string that does not end
                break
    return items, "the list does not end", data[begin:]
