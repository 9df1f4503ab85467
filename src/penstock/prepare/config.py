"""What a prepare run does with each document: the recipe, as JSON or TOML, strict.

    {"input": {"sections": [{"field": "messages", "action": "$role", "template": true}]},
     "mask": {"assistant": "train"}}

`sections` make one sequence of a document; `sources` make several, each under its own key, and
override `sections`. Both stay the plain lists and dicts they were given as; `outputs` is what
they come to.

>>> PipelineConfig.from_json('{"input": {"section": []}}')
Traceback (most recent call last):
penstock.errors.ConfigError: JSON: unknown key input.section (meant: sections?)
"""

from __future__ import annotations

import copy
import json
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError, MissingData
from penstock.prepare.values import (
    ACTIONS,
    ROLE_ACTIONS,
    check_keys,
    choice,
    count,
    optional_count,
    shown,
    text,
    truth,
)

PACKINGS = ("simple", "bfd", "bfd_split")
_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,99}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One field of a document, and what becomes of it."""

    field: str
    action: str  # "train" | "mask" | "$role" | "value"
    template: bool = False
    add_special_tokens: bool = False  # BOS before it, unless the sequence has one
    append_eos: bool = False
    add_generation_prompt: bool = False  # after the last message of a template


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """One key that every record has, made of sections, and the key of its mask if it has one."""

    key: str
    sections: tuple[Section, ...]
    mask_key: str | None
    nested: bool = False  # a list of sequences

    @property
    def value(self) -> bool:
        """Whether it holds numbers in place of tokens."""
        return self.sections[0].action == "value"

    @property
    def plain(self) -> bool:
        """Whether it is text, all of which is trained."""
        return all(s.action == "train" and not s.template for s in self.sections)

    @property
    def trained(self) -> bool:
        """Whether anything of it can be meant to be trained."""
        return any(section.action != "mask" for section in self.sections) and not self.value


@dataclass(frozen=True, slots=True)
class InputConfig:
    """Which fields make a record: one sequence of `sections`, or several `sources`."""

    sections: list[dict[str, Any]] | None = None
    sources: dict[str, dict[str, Any]] | None = None

    def __post_init__(self) -> None:
        if self.sections is not None:
            _sections(self.sections, "input.sections", listed=False)
        if self.sources is not None:
            _outputs_of(self.sources)
        for name in ("sections", "sources"):  # shared with nobody
            object.__setattr__(self, name, copy.deepcopy(getattr(self, name)))

    @property
    def outputs(self) -> tuple[Output, ...]:
        """The keys to make, in order; none where neither is given.

        >>> [output] = InputConfig([{"field": "text", "action": "train"}]).outputs
        >>> output.key, output.mask_key, output.sections[0].add_special_tokens
        ('sequence', None, True)
        """
        if self.sources is not None:
            return tuple(_outputs_of(self.sources))
        if self.sections is None:
            return ()
        sections = _sections(self.sections, "input.sections", listed=False)
        output = Output(key="sequence", sections=sections, mask_key="loss_mask")
        if output.plain:
            return (Output(key="sequence", sections=sections, mask_key=None),)
        return (output,)


@dataclass(frozen=True, slots=True)
class ProcessingConfig:
    """Limits, and how records are packed."""

    max_seq_len: int | None = 2048  # None, or "none" in TOML: no limit
    min_chars: int = 50  # these three for plain-text recipes only
    max_chars: int = 2_000_000
    keep_blank: bool = False  # plain text of blanks alone, where it has tokens
    max_items: int | None = None  # accepted documents
    packing_strategy: str = "simple"
    max_packed_len: int = 8192
    truncation_mode: str = "keep_start"

    def __post_init__(self) -> None:
        where = "preprocessing"
        for name in ("max_seq_len", "max_items"):
            value = optional_count(getattr(self, name), f"{where}.{name}")
            object.__setattr__(self, name, value)
        count(self.min_chars, f"{where}.min_chars", least=0)
        count(self.max_chars, f"{where}.max_chars")
        count(self.max_packed_len, f"{where}.max_packed_len")
        truth(self.keep_blank, f"{where}.keep_blank")
        choice(self.packing_strategy, PACKINGS, f"{where}.packing_strategy")
        choice(self.truncation_mode, ("keep_start", "keep_end"), f"{where}.truncation_mode")
        if self.min_chars > self.max_chars:
            raise ConfigError(
                f"{where}.min_chars is {self.min_chars:,} and max_chars {self.max_chars:,}: no "
                "text is that long and that short, so swap or drop one"
            )


@dataclass(frozen=True, slots=True)
class OutputConfig:
    """Where records go, and as which types."""

    domain_key: str | None = None
    storage_format: str = "bin"
    max_tokens_per_shard: int = 100_000_000
    dtype: dict[str, str] = field(default_factory=dict)
    position_ids_mode: str = "none"

    def __post_init__(self) -> None:
        if self.domain_key is not None:
            text(self.domain_key, "output.domain_key")
        choice(self.storage_format, ("bin", "h5"), "output.storage_format")
        count(self.max_tokens_per_shard, "output.max_tokens_per_shard")
        modes = ("none", "doc_reset", "continuous")
        choice(self.position_ids_mode, modes, "output.position_ids_mode")
        if not isinstance(self.dtype, Mapping):
            raise ConfigError(f"output.dtype must map keys to dtypes, found {shown(self.dtype)}")
        for key, name in self.dtype.items():
            from penstock.store.schema import DTYPES  # noqa: PLC0415 - it imports numpy

            choice(name, DTYPES, f"output.dtype.{key}")
        object.__setattr__(self, "dtype", dict(self.dtype))


@dataclass(frozen=True, slots=True)
class PipelineConfig:
    """A recipe. `mask` says for each role whether it is trained, `mask_default` for the rest."""

    version: int = 1
    input: InputConfig = field(default_factory=InputConfig)
    mask: dict[str, str] = field(default_factory=dict)
    mask_default: str = "mask"
    preprocessing: ProcessingConfig = field(default_factory=ProcessingConfig)
    output: OutputConfig = field(default_factory=OutputConfig)

    def __post_init__(self) -> None:
        if self.version != 1 or isinstance(self.version, bool):
            raise ConfigError(
                f"version must be 1, found {shown(self.version)}: a newer recipe needs a newer "
                "Penstock"
            )
        for name, kind in _PARTS.items():
            if not isinstance(getattr(self, name), kind):
                found = shown(getattr(self, name))
                raise ConfigError(f"{name} must be {kind.__name__}, found {found}")
        if not isinstance(self.mask, Mapping):
            raise ConfigError(f"mask must map roles to actions, found {shown(self.mask)}")
        for role, action in self.mask.items():
            text(role, "a role in mask")
            choice(action, ROLE_ACTIONS, f"mask.{role}")
        choice(self.mask_default, ROLE_ACTIONS, "mask_default")
        object.__setattr__(self, "mask", dict(self.mask))
        for mistake in _dtype_mistakes(self.output.dtype, self.input.outputs):
            raise ConfigError(mistake)

    def trains(self, role: str) -> bool:
        """Whether messages of a role are trained."""
        return self.mask.get(role, self.mask_default) == "train"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, where: str = "recipe") -> PipelineConfig:
        """A recipe from its tables; `where` is what errors call it."""
        if not isinstance(values, Mapping):
            raise ConfigError(f"{where} must be an object, found {shown(values)}")
        try:
            check_keys(values, [f.name for f in fields(cls)], "")
            found = dict(values)
            for name, kind in _PARTS.items():
                part = found.get(name, {})
                if not isinstance(part, Mapping):
                    raise ConfigError(f"{name} must be an object, found {shown(part)}")
                check_keys(part, [f.name for f in fields(kind)], name)
                found[name] = kind(**part)
            return cls(**found)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None

    @classmethod
    def from_json(cls, source: str | os.PathLike[str]) -> PipelineConfig:
        """A recipe from JSON, or from a file of it: text that begins with { is JSON itself."""
        if isinstance(source, str) and source.lstrip("\ufeff \t\r\n").startswith("{"):
            return cls.from_dict(_parsed_json(source, "JSON"), where="JSON")
        where = os.fspath(source)
        return cls.from_dict(_parsed_json(_read(where), where), where=where)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> PipelineConfig:
        """A recipe from a .json or .toml file."""
        where = os.fspath(path)
        match Path(where).suffix.lower():
            case ".json":
                return cls.from_json(Path(where))
            case ".toml":
                try:
                    values = tomllib.loads(_read(where))
                except (tomllib.TOMLDecodeError, RecursionError) as error:
                    raise ConfigError(f"{where} is not valid TOML: {error}") from None
                return cls.from_dict(values, where=where)
        raise ConfigError(f"{where} must end in .json or .toml, so that it is known how to read it")

    def to_dict(self) -> dict[str, Any]:
        """Tables of which `from_dict` makes this recipe again, every default spelt out.

        >>> PipelineConfig.from_dict(PipelineConfig().to_dict()) == PipelineConfig()
        True
        """
        return asdict(self)

    def to_file(self, path: str | os.PathLike[str]) -> None:
        """Write the recipe as a JSON file."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")


_PARTS: dict[str, type[InputConfig | ProcessingConfig | OutputConfig]] = {
    "input": InputConfig,
    "preprocessing": ProcessingConfig,
    "output": OutputConfig,
}


def _outputs_of(sources: Any) -> Iterator[Output]:
    """The outputs that `input.sources` describes; all is checked once they are all taken."""
    if not isinstance(sources, Mapping) or not sources:
        raise ConfigError(f"input.sources must name at least one source, found {shown(sources)}")
    taken: set[str] = set()
    outputs = []
    for key, spec in sources.items():
        where = f"input.sources.{key}"
        if not isinstance(key, str) or not _KEY.fullmatch(key):
            raise ConfigError(f"{where}: a key is made of letters, digits, _ and -")
        if not isinstance(spec, Mapping):
            raise ConfigError(f"{where} must be an object with sections, found {shown(spec)}")
        check_keys(spec, ("sections", "list_field", "mask_key"), where)
        nested = truth(spec.get("list_field", False), f"{where}.list_field")
        sections = _sections(spec.get("sections"), f"{where}.sections", listed=nested)
        mask_key: str | None = spec.get("mask_key")
        if mask_key is not None and not _KEY.fullmatch(text(mask_key, f"{where}.mask_key")):
            raise ConfigError(f"{where}.mask_key: a key is made of letters, digits, _ and -")
        output = Output(key=key, sections=sections, mask_key=mask_key, nested=nested)
        if output.value and (nested or mask_key is not None):
            raise ConfigError(f"{where} holds values: it has neither list_field nor mask_key")
        if output.trained and mask_key is None:
            output = Output(key=key, sections=sections, mask_key=f"{key}_mask", nested=nested)
        for name in filter(None, (output.key, output.mask_key)):
            if name in taken:
                raise ConfigError(f"{where}: the output key {name!r} is made twice; rename one")
            taken.add(name)
        outputs.append(output)
    return iter(outputs)


def _sections(given: Any, where: str, *, listed: bool) -> tuple[Section, ...]:
    if not isinstance(given, (list, tuple)) or not given:
        raise ConfigError(f"{where} must be a list of at least one section, found {shown(given)}")
    made: list[Section] = []
    for i, spec in enumerate(given):
        first = not listed and all(section.template for section in made)
        made.append(_section(spec, f"{where}[{i}]", first=first))
    if len(made) > 1 and any(section.action == "value" for section in made):
        raise ConfigError(f"{where}: a section with action 'value' stands alone in its source")
    if where == "input.sections" and made[0].action == "value":
        raise ConfigError(f"{where}: action 'value' belongs to input.sources, where it has a key")
    return tuple(made)


def _section(spec: Any, where: str, *, first: bool) -> Section:
    if not isinstance(spec, Mapping):
        raise ConfigError(f"{where} must be an object, found {shown(spec)}")
    check_keys(spec, [f.name for f in fields(Section)], where)
    if missing := [key for key in ("field", "action") if key not in spec]:
        raise ConfigError(f"{where} lacks {' and '.join(missing)}")
    text(spec["field"], f"{where}.field")
    action = choice(spec["action"], ACTIONS, f"{where}.action")
    template = truth(spec.get("template", False), f"{where}.template")
    special = spec.get("add_special_tokens", first and not template)
    if action == "$role" and not template:
        raise ConfigError(f"{where}: action '$role' needs template = true: text has no roles")
    if action == "value" and template:
        raise ConfigError(f"{where}: action 'value' takes numbers as they are, without template")
    prompt = truth(spec.get("add_generation_prompt", False), f"{where}.add_generation_prompt")
    if prompt and not template:
        raise ConfigError(f"{where}.add_generation_prompt needs template = true")
    return Section(
        field=spec["field"],
        action=action,
        template=template,
        add_special_tokens=truth(special, f"{where}.add_special_tokens"),
        append_eos=truth(spec.get("append_eos", False), f"{where}.append_eos"),
        add_generation_prompt=prompt,
    )


def _dtype_mistakes(dtypes: Mapping[str, str], outputs: Iterable[Output]) -> Iterator[str]:
    for output in outputs:
        dtype = dtypes.get(output.key, "")
        if output.value and dtype and not dtype.startswith("float"):
            yield f"output.dtype.{output.key} is {dtype}, which would cut fractions: use float32"
        if not output.value and dtype and not dtype.startswith(("int", "uint")):
            yield f"output.dtype.{output.key} is {dtype}, where tokens need an integer"


def _read(where: str) -> str:
    try:
        return Path(where).read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise MissingData(f"{where} does not exist: expected a recipe") from None
    except OSError as error:
        raise ConfigError(f"{where} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where} is not UTF-8, at byte {error.start}") from None


def _parsed_json(source: str, where: str) -> Any:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise ConfigError(f"{where}: {key!r} is there twice; keep one")
            found[key] = value
        return found

    try:
        return json.loads(source.removeprefix("\ufeff"), object_pairs_hook=once)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{where} is not valid JSON: {error.msg} (line {error.lineno}, column {error.colno})"
        ) from None
    except RecursionError:
        raise ConfigError(f"{where} is nested too deeply for a recipe") from None
