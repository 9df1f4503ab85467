"""The `[data]` table of a run: what to read, in which shares, and when the shares change.

    [[data.datasets]]
    path = "tokens/web"
    weight = 3.0

    [[data.datasets]]
    path = "tokens/code"

    [[data.phases]]
    start_step = 10_000
    dataset_weights = { code = 9.0 }        # web keeps its 3.0

A config is checked when it is made, and `resolve` turns it into sources and stages. Only a schedule
without `datasets` is left for `resolve` to check: scripts make one before they name their data. The
constructors convert no tables; `load_config` reads TOML and refuses what it does not know.
"""

from __future__ import annotations

import os
import reprlib
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from inspect import signature
from itertools import pairwise
from numbers import Integral
from pathlib import Path, PurePath
from typing import Any, Literal, TypeVar, get_args

from penstock.errors import ConfigError, MissingData
from penstock.order import shares

WeightsCount = Literal["samples", "tokens"]
OnMaxEpochs = Literal["error", "warn"]
TOKEN_DTYPES = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DatasetSource:
    """One source of a mixture: a folder of tokens or a dataset of the Hub.

    >>> DatasetSource(path="/data/web_tokens", weight=2).weight
    2.0
    """

    path: str = ""  # a folder of tokens or a store
    weight: float = 1.0  # relative to the others'
    name: str = ""  # what phases and metrics call it
    hf_name: str = ""  # a dataset of the Hub, in place of path
    hf_config: str = ""
    max_epochs: float | None = field(default=None, kw_only=True)  # more is told by `penstock plan`

    def __post_init__(self) -> None:
        _settle(self)

    @property
    def source_name(self) -> str:
        """`name`, else the last part of the path, else the name on the Hub.

        >>> DatasetSource(path="/data/web_tokens/").source_name
        'web_tokens'
        >>> DatasetSource(hf_name="allenai/c4", hf_config="en").source_name
        'allenai/c4:en'
        """
        on_hub = f"{self.hf_name}:{self.hf_config}" if self.hf_config else self.hf_name
        return self.name or PurePath(self.path).name or self.path or on_hub


@dataclass(frozen=True, slots=True)
class TrainingPhase:
    """From `start_step` on: these weights, and the learning rate times `lr_scale`.

    A dataset left out has its base weight, whatever the phase before gave it; 0 drops it.

    >>> TrainingPhase(10_000, {"code": 9, "web": 0}).dataset_weights
    {'code': 9.0, 'web': 0.0}
    """

    start_step: int = 0
    dataset_weights: dict[str, float] = field(default_factory=dict)
    lr_scale: float = 1.0

    def __post_init__(self) -> None:
        _settle(self)


@dataclass(frozen=True, slots=True)
class DataConfig:
    """The `[data]` table. Lists and dicts are copied; `dataclasses.replace` checks anew.

    >>> DataConfig(num_workers=True)
    Traceback (most recent call last):
    penstock.errors.ConfigError: num_workers must be int, found True (bool)
    """

    dataset_path: str = ""  # a folder of tokens or a store
    file_pattern: str = "*.npy"  # which files of a plain folder
    tokenizer_path: str = ""
    num_workers: int = 4
    pin_memory: bool = True
    prefetch_factor: int = 2
    pack_sequences: bool = False  # keep the documents of a row apart
    hf_dataset_name: str | None = None  # "" is None: TOML has no null
    hf_dataset_config: str | None = None
    hf_dataset_split: str = "train"
    hf_dataset_text_field: str = "text"
    hf_streaming: bool = False
    datasets: list[DatasetSource] = field(default_factory=list)  # overrides the two above
    mix_temperature: float = 1.0  # > 1 evens the weights out, < 1 sharpens them
    phases: list[TrainingPhase] = field(default_factory=list)
    anneal_start_step: int = 0  # short for one phase; 0 is none
    anneal_weights: dict[str, float] = field(default_factory=dict)
    token_dtype: str | None = field(default=None, kw_only=True)  # of raw .bin files
    weights_count: WeightsCount = field(default="samples", kw_only=True)  # shares of what
    packing: str | None = field(default=None, kw_only=True)  # how rows are made; None: windows
    balance: str | None = field(default=None, kw_only=True)  # "attention": even among ranks
    on_max_epochs: OnMaxEpochs = field(default="error", kw_only=True)  # what a plan past one is

    def __post_init__(self) -> None:
        _settle(self)
        for mistake in _mistakes(self):
            raise ConfigError(mistake)

    @property
    def source_names(self) -> tuple[str, ...]:
        """What `datasets` are called.

        >>> DataConfig(datasets=[DatasetSource("tokens/web")]).source_names
        ('web',)
        """
        return tuple(source.source_name for source in self.datasets)

    @property
    def active_phases(self) -> tuple[TrainingPhase, ...]:
        """The phases, the annealing shortcut being one.

        >>> DataConfig(anneal_start_step=500, anneal_weights={"code": 1}).active_phases
        (TrainingPhase(start_step=500, dataset_weights={'code': 1.0}, lr_scale=1.0),)
        """
        if self.anneal_start_step and self.anneal_weights:
            return (TrainingPhase(self.anneal_start_step, self.anneal_weights),)
        return tuple(self.phases)

    def lr_scale(self, step: int) -> float:
        """What to multiply the learning rate of this step by.

        >>> config = DataConfig(phases=[TrainingPhase(100, lr_scale=0.5)])
        >>> config.lr_scale(99), config.lr_scale(100)
        (1.0, 0.5)
        """
        step = _typed("step", "int", step)
        begun = [phase.lr_scale for phase in self.active_phases if phase.start_step <= step]
        return begun[-1] if begun else 1.0


@dataclass(frozen=True, slots=True)
class ResolvedStage:
    """From `start_step` on: a share for each source, of what `weights_count` says."""

    start_step: int
    weights: tuple[float, ...]
    lr_scale: float


@dataclass(frozen=True, slots=True)
class Resolved:
    """What a config comes to: every source has its name, and the first stage is at step 0."""

    sources: tuple[DatasetSource, ...]
    stages: tuple[ResolvedStage, ...]


def data_path(config: DataConfig) -> Literal["mixture", "tokens", "hub", "hub_stream"]:
    """Which of the four ways to read applies: the first that is set.

    >>> data_path(DataConfig("tokens", hf_dataset_name="allenai/c4"))
    'tokens'
    """
    if config.datasets:
        return "mixture"
    if config.dataset_path:
        return "tokens"
    if config.hf_dataset_name:
        return "hub_stream" if config.hf_streaming else "hub"
    raise ConfigError("[data] is without data: set datasets, dataset_path or hf_dataset_name")


def resolve(config: DataConfig) -> Resolved:
    """Sources and stages, temperature applied. A single dataset is a mixture of one.

    >>> config = DataConfig(
    ...     datasets=[DatasetSource("web", weight=3), DatasetSource("code")],
    ...     phases=[TrainingPhase(100, {"code": 9}, lr_scale=0.5)],
    ... )
    >>> for stage in resolve(config).stages:
    ...     print(stage)
    ResolvedStage(start_step=0, weights=(0.75, 0.25), lr_scale=1.0)
    ResolvedStage(start_step=100, weights=(0.25, 0.75), lr_scale=0.5)
    """
    way, given = data_path(config), config.datasets
    if way == "tokens":
        given = [DatasetSource(config.dataset_path)]
    elif way != "mixture":
        name, subset = config.hf_dataset_name or "", config.hf_dataset_config or ""
        given = [DatasetSource(hf_name=name, hf_config=subset)]
    sources = tuple(replace(source, name=source.source_name) for source in given)
    for mistake in _weight_mistakes(config, [source.name for source in sources]):
        raise ConfigError(mistake)
    phases = config.active_phases
    if not phases or phases[0].start_step > 0:
        phases = (TrainingPhase(), *phases)
    stages = []
    for phase in phases:
        asked = [phase.dataset_weights.get(source.name, source.weight) for source in sources]
        weights = shares(asked, config.mix_temperature)
        stages.append(ResolvedStage(phase.start_step, weights, phase.lr_scale))
    return Resolved(sources, tuple(stages))


def load_config(path: str | os.PathLike[str]) -> DataConfig:
    """The `[data]` table of a TOML file; its other tables are the trainer's, and left alone.

    Paths in it are relative to where the process runs, not to the file.

    >>> load_config("nowhere.toml")
    Traceback (most recent call last):
    penstock.errors.MissingData: nowhere.toml does not exist: expected TOML with a [data] table
    """
    return parse_config(read_config(path), os.fspath(path))


def read_config(path: str | os.PathLike[str]) -> str:
    """The text of a TOML file."""
    where = os.fspath(path)
    try:
        return Path(where).read_bytes().decode("utf-8-sig")
    except FileNotFoundError as err:
        raise MissingData(f"{where} does not exist: expected TOML with a [data] table") from err
    except OSError as err:
        raise ConfigError(f"{where} cannot be read: {err.strerror}") from err
    except UnicodeDecodeError as err:
        line = err.object.count(b"\n", 0, err.start) + 1
        raise ConfigError(f"{where} is not valid TOML: not UTF-8 (at line {line})") from err


def parse_config(text: str, where: str = "TOML") -> DataConfig:
    r"""`load_config` of a text; `where` is what errors call it.

    >>> parse_config("[data]\nnum_worker = 4")
    Traceback (most recent call last):
    penstock.errors.ConfigError: TOML: Unknown config keys: data.num_worker (meant: num_workers?)
    """
    data = _data_table(tables_of(text, where), where)
    for key, kind in (("datasets", DatasetSource), ("phases", TrainingPhase)):
        entries = data.get(key, [])
        if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
            found = reprlib.repr(entries)
            raise ConfigError(f"{where}: data.{key} must be tables, [[data.{key}]], found {found}")
        data[key] = [made(kind, e, where, f"data.{key}[{i}]") for i, e in enumerate(entries)]
    return made(DataConfig, data, where, "data")


def tables_of(text: str, where: str) -> dict[str, Any]:
    """All tables of a TOML text."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as err:
        problem = str(err).replace("end of document", f"the end, line {text.count(chr(10)) + 1}")
        raise ConfigError(f"{where} is not valid TOML: {problem}") from err


def _data_table(tables: dict[str, Any], where: str) -> dict[str, Any]:
    """The table `data`, or an error that says where it seems to have gone."""
    if astray := [f.name for f in fields(DataConfig) if f.name in tables]:
        raise ConfigError(f"{where}: {', '.join(astray)} must stand in a table, under [data]")
    if isinstance(tables.get("data"), dict):
        return dict(tables["data"])
    near = get_close_matches("data", [key.lower() for key in tables], n=1)
    found = [f", but {k} = {reprlib.repr(v)}" for k, v in tables.items() if k.lower() in near]
    raise ConfigError(f"{where} has no table [data]{''.join(found)}")


def made(kind: Callable[..., T], values: dict[str, Any], where: str, table: str) -> T:
    """`kind(**values)`, its errors saying where the values come from."""
    known = list(signature(kind).parameters)
    if unknown := [f"{table}.{key} ({_meant(key, known)})" for key in values if key not in known]:
        raise ConfigError(f"{where}: Unknown config keys: {', '.join(unknown)}")
    try:
        return kind(**values)
    except ConfigError as err:
        raise ConfigError(f"{where}, {table}: {err}") from err


def _meant(word: str, known: Iterable[str]) -> str:
    """A hint: what a misspelt word is nearest to, or else all that is known."""
    spelled = {name.lower(): name for name in known}
    near = get_close_matches(word.lower(), spelled, n=1)
    return f"meant: {spelled[near[0]]}?" if near else f"known: {', '.join(spelled.values())}"


def _settle(record: DataConfig | DatasetSource | TrainingPhase) -> None:
    """Put a value of exactly the annotated type, the record's own, in the place of each field."""
    for f in fields(record):
        value = _typed(f.name, str(f.type), getattr(record, f.name))
        object.__setattr__(record, f.name, value)


def _typed(key: str, kind: str, value: Any, *, zero: bool = False) -> Any:
    """A value as it is annotated: 2 for a float is 2.0, but neither True nor 2.0 is an int.

    No number of a config is negative, and no float is zero but a phase's weight.
    """
    match kind, value:
        case "bool", bool():
            return value
        case _, bool():
            pass
        case "str" | "WeightsCount" | "OnMaxEpochs", str() | os.PathLike():
            return os.fspath(value)
        case "str | None", str() | None:
            return value or None
        case "float | None", None:
            return None
        case "int", Integral():
            return int(_ranged(key, value))
        case "float" | "float | None", float() | Integral():
            return float(_ranged(key, value, zero=zero))
        case "dict[str, float]", Mapping():
            names = [_typed(f"a name in {key}", "str", name) for name in value]
            numbers = [_typed(f"{key}[{n!r}]", "float", w, zero=True) for n, w in value.items()]
            return dict(zip(names, numbers, strict=True))
        case "list[DatasetSource]" | "list[TrainingPhase]", list() | tuple():
            record = DatasetSource if kind == "list[DatasetSource]" else TrainingPhase
            if all(isinstance(item, record) for item in value):
                return list(value)
    raise ConfigError(f"{key} must be {kind}, found {reprlib.repr(value)} ({type(value).__name__})")


def _ranged(key: str, value: Any, *, zero: bool = True) -> Any:
    if not abs(value) <= sys.float_info.max:  # so written, NaN is refused as well
        raise ConfigError(f"{key} must be finite, found {value}")
    if value < 0 or not (zero or float(value)):
        raise ConfigError(f"{key} must be {'non-negative' if zero else 'positive'}, found {value}")
    return value


def _mistakes(config: DataConfig) -> Iterator[str]:
    if config.prefetch_factor < 1:
        yield f"prefetch_factor must be >= 1, found {config.prefetch_factor}"
    for key, allowed in (
        ("weights_count", get_args(WeightsCount)),
        ("token_dtype", TOKEN_DTYPES),
        ("balance", ("attention",)),
        ("on_max_epochs", get_args(OnMaxEpochs)),
    ):
        if getattr(config, key) not in (*allowed, None):
            yield f"{key} must be one of {', '.join(allowed)}, found {getattr(config, key)!r}"
    if config.balance and not config.packing:
        yield "balance deals out packed rows: set packing, too"
    if config.hf_streaming and config.datasets:
        yield "hf_streaming does not go with datasets: a mixture is read from disk; leave it out"
    if config.hf_streaming and not config.hf_dataset_name:
        yield "hf_streaming needs hf_dataset_name"
    steps = [phase.start_step for phase in config.phases]
    if any(after <= before for before, after in pairwise(steps)):
        yield f"start_step of phases must be strictly monotonically increasing, found {steps}"
    if config.phases and (config.anneal_start_step or config.anneal_weights):
        yield "Cannot use both phases and anneal_start_step/anneal_weights: make it one more phase"
    yield from _source_mistakes(config)
    if config.datasets:
        yield from _weight_mistakes(config, config.source_names)


def _source_mistakes(config: DataConfig) -> Iterator[str]:
    names = config.source_names
    for i, source in enumerate(config.datasets):
        if bool(source.path) == bool(source.hf_name):
            found = "both" if source.path else "neither"
            yield f"datasets[{i}] must have either path or hf_name, found {found}"
        if source.hf_config and not source.hf_name:
            yield f"datasets[{i}] has hf_config, which goes with hf_name, not with path"
        if (first := names.index(names[i])) != i:
            yield f"datasets[{first}] and datasets[{i}] are both called {names[i]!r}: set one name"


def _weight_mistakes(config: DataConfig, names: Sequence[str]) -> Iterator[str]:
    if bool(config.anneal_weights) != bool(config.anneal_start_step):
        found = f"anneal_start_step is {config.anneal_start_step}"
        yield f"{found}, anneal_weights {config.anneal_weights}: set both, or neither"
    for i, phase in enumerate(config.active_phases):
        key = f"phases[{i}].dataset_weights" if config.phases else "anneal_weights"
        for name in phase.dataset_weights:
            if name not in names:
                yield f"{key} names an unknown dataset, {name!r} ({_meant(name, names)})"
        if not any(phase.dataset_weights.get(name, 1.0) for name in names):
            yield f"{key} leaves no dataset with any weight: at least one must be positive"
