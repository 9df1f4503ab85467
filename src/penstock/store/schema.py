"""Which keys a store holds, of which dtype, and which offsets measure them.

Each key names its offsets arrays, outermost first. Keys that are aligned share theirs, which is
what makes "all per-token keys of a record have equal length" true of every store on disk:

    >>> schema = Schema.of({"sequence": None, "loss_mask": "bool"}, vocab_size=50_000)
    >>> {name: (key.dtype, key.role, key.offsets) for name, key in schema.keys.items()}
    {'sequence': ('uint16', 'ids', ('sequence',)), 'loss_mask': ('bool', 'mask', ('sequence',))}

A nested key (a prompt's responses) has two: record → items, items → tokens. A value (a reward)
is one number an item, or, of a key that is not nested, any number of values a record.

    >>> schema = Schema.of({"responses": Key(dtype="uint16", nested=True), "rewards": "float32"})
    >>> {name: key.offsets for name, key in schema.keys.items()}
    {'responses': ('responses', 'responses.items'), 'rewards': ('responses',)}
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError, DataError

Role = Literal["ids", "mask", "positions", "value"]

DTYPES = (
    "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64",
    "float16", "float32", "float64",
)  # fmt: skip
_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,99}")
_RESERVED = {"offsets", "__offsets__", "source", "meta", "manifest"}
_PARTNERS = {"loss_mask": "sequence", "position_ids": "sequence", "masks": "responses"}
_ROLES: tuple[Role, ...] = ("ids", "mask", "positions", "value")


def is_mask(name: str) -> bool:
    """Whether a key is a mask by its name.

    >>> [is_mask(name) for name in ("loss_mask", "masks", "chosen_mask", "sequence")]
    [True, True, True, False]
    """
    return name in {"loss_mask", "masks"} or name.endswith("_mask")


def aligned_with(name: str) -> str:
    """The key with which one is aligned, by its name; a key on its own, with itself.

    >>> [aligned_with(name) for name in ("loss_mask", "masks", "chosen_mask", "chosen")]
    ['sequence', 'responses', 'chosen', 'chosen']
    """
    return _PARTNERS.get(name, name.removesuffix("_mask"))


def parse_dtype(name: object, where: object) -> np.dtype[Any]:
    """The little-endian dtype of that name: numbers and bool, nothing else."""
    if not isinstance(name, str) or name not in DTYPES:
        raise DataError(
            f"{where} states the dtype {name!r}, where one of {', '.join(DTYPES)} was expected."
        )
    return np.dtype(name).newbyteorder("<")


def named_dtype(dtype: npt.DTypeLike) -> str:
    """The name of a dtype that a user gave, if a store can hold it."""
    try:
        name = np.dtype(dtype).name
    except (TypeError, ValueError):
        name = repr(dtype)
    if name not in DTYPES:
        raise ConfigError(
            f"dtype {name} cannot be stored: use one of {', '.join(DTYPES)} "
            "(uint16 holds vocabularies up to 65,536)."
        )
    return name


def dtype_for(vocab_size: int) -> str:
    """The dtype of tokens of a vocabulary.

    >>> dtype_for(65_536), dtype_for(65_537)
    ('uint16', 'uint32')
    """
    return "uint16" if vocab_size <= 65536 else "uint32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """How one key is written. What is None follows from the name, the dtype and the vocabulary.

    `nested`: a list of arrays a record. `group`: the key it is aligned with. `role`: "ids" are
    checked against the vocabulary; a "value" is a number an item, not one a token.
    """

    dtype: str | None = None
    nested: bool = False
    group: str | None = None
    role: Role | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredKey:
    """One key as it stands on disk."""

    dtype: str
    role: Role
    offsets: tuple[str, ...]

    @property
    def innermost(self) -> str:
        """The offsets array whose end is the key's total."""
        return self.offsets[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """The keys in order, and the offsets arrays in the order in which they are stored."""

    keys: dict[str, StoredKey]
    parents: dict[str, str | None]  # offsets array → the array one level out

    @classmethod
    def of(
        cls,
        keys: Mapping[str, Key | npt.DTypeLike | None],
        *,
        vocab_size: int | None = None,
        groups: Iterable[Iterable[str]] | None = None,
    ) -> Schema:
        """The schema a writer was asked for; `groups` replace the default alignment."""
        wanted = {name: _key(key) for name, key in keys.items()}
        if not wanted:
            raise ConfigError("No keys were given: say which there are, as {'sequence': 'uint16'}.")
        for name in wanted:
            if not _KEY.fullmatch(name) or name in _RESERVED:
                raise ConfigError(
                    f"{name!r} cannot be a key: use letters, digits, _ and -, and none of "
                    f"{', '.join(sorted(_RESERVED))}."
                )
        leads = _leads(wanted, groups)
        found = {}
        for name, key in wanted.items():
            role = key.role or _role(name, key)
            lead = leads[name]
            offsets = (lead, f"{lead}.items") if key.nested else (lead,)
            found[name] = StoredKey(
                dtype=_writable_dtype(name, key, role, vocab_size), role=role, offsets=offsets
            )
        return cls._checked(found, "the schema", ConfigError)

    @classmethod
    def from_json(cls, value: object, where: object) -> Schema:
        """The schema that a manifest or a meta.json states under "keys"."""
        if not isinstance(value, dict) or not value:
            raise DataError(f'{where} has no "keys" object: write the store again.')
        found = {}
        for name, entry in value.items():
            offsets = entry.get("offsets") if isinstance(entry, dict) else None
            role = entry.get("role", "ids") if isinstance(entry, dict) else None
            if (
                not _KEY.fullmatch(name)
                or not isinstance(offsets, list)
                or len(offsets) not in {1, 2}
                or not all(isinstance(array, str) for array in offsets)
                or role not in _ROLES
            ):
                raise DataError(
                    f"{where} describes the key {name!r} in a way that is not format 1."
                )
            parse_dtype(entry.get("dtype"), f"{where}, key {name!r},")
            found[name] = StoredKey(dtype=entry["dtype"], role=role, offsets=tuple(offsets))
        return cls._checked(found, where, DataError)

    @classmethod
    def _checked(
        cls, keys: dict[str, StoredKey], where: object, error: type[ConfigError | DataError]
    ) -> Schema:
        parents: dict[str, str | None] = {}
        for name, key in keys.items():
            outer = None
            for array in key.offsets:
                if parents.setdefault(array, outer) != outer or array == outer:
                    raise error(f"{where} gives {name!r} offsets that contradict another key's.")
                outer = array
        return cls(keys=keys, parents=parents)

    def to_json(self, totals: Mapping[str, int] | None = None) -> dict[str, Any]:
        """The "keys" object; with totals, each key has its shape too."""
        return {
            name: {
                "dtype": key.dtype,
                **({} if totals is None else {"shape": [totals[key.innermost]]}),
                "role": key.role,
                "offsets": list(key.offsets),
            }
            for name, key in self.keys.items()
        }

    def entries(self, array: str, documents: Any, totals: Mapping[str, Any]) -> Any:
        """Entries of an offsets array: records, or what the array one level out counts."""
        parent = self.parents[array]
        return documents if parent is None else totals[parent]

    @property
    def token_keys(self) -> list[str]:
        """Keys that hold one value a token; all keys where none does."""
        found = [name for name, key in self.keys.items() if key.role != "value"]
        return found or list(self.keys)


def _key(given: Key | npt.DTypeLike | None) -> Key:
    """A key as it was given, its dtype by name.

    >>> _key(np.uint16).dtype, _key(None).dtype
    ('uint16', None)
    """
    if not isinstance(given, Key):
        return Key(dtype=None if given is None else named_dtype(given))
    return given if given.dtype is None else replace(given, dtype=named_dtype(given.dtype))


def _role(name: str, key: Key) -> Role:
    if key.dtype == "bool" or is_mask(name):
        return "mask"
    if name == "position_ids":
        return "positions"
    if key.dtype is not None and key.dtype.startswith("float"):
        return "value"
    return "ids"


def _writable_dtype(name: str, key: Key, role: Role, vocab_size: int | None) -> str:
    if key.dtype is not None:
        return key.dtype
    match role:
        case "mask":
            return "bool"
        case "positions":
            return "int32"
        case "value":
            return "float32"
        case "ids":
            if vocab_size is None:
                raise ConfigError(
                    f"The dtype of {name!r} is unknown: give it, or vocab_size=, from which it "
                    "follows."
                )
            return dtype_for(vocab_size)


def _leads(keys: Mapping[str, Key], groups: Iterable[Iterable[str]] | None) -> dict[str, str]:
    """The key after which each key's offsets are called.

    By default `<x>_mask` is aligned with `<x>`, `loss_mask` and `position_ids` with `sequence`,
    `masks` and `rewards` with `responses`.
    """
    if groups is None:
        leads = {name: aligned_with(name) for name in keys}
        rewarded = keys.get("responses")
        if "rewards" in keys and rewarded is not None and rewarded.nested:
            leads["rewards"] = "responses"
    else:
        leads = {name: members[0] for members in map(list, groups) for name in members}
    for name, key in keys.items():
        lead = key.group or leads.get(name, name)
        if lead not in keys:
            if key.group is not None:
                raise ConfigError(f"{name!r} is to be aligned with {lead!r}, which is not a key.")
            lead = name
        leads[name] = lead
    return {name: leads[leads[name]] for name in keys}
