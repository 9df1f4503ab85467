"""Which files a split of a dataset consists of, as `datasets` resolves them, pinned to a commit.

    files = sources_of("HuggingFaceFW/fineweb", "sample-10BT", "train")
    files.paths[0]             # hf://datasets/HuggingFaceFW/fineweb@9bb295d…/sample/10BT/….parquet
    sources_of("folder", None, "train[:10%]").plain      # False: ask `datasets` for the documents

What was resolved on the Hub is remembered in the cache, so that a pinned revision, or any under
HF_HUB_OFFLINE=1, is found again without a network.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from penstock.cache import cache_folder, write_whole
from penstock.errors import ConfigError, MissingData, MissingExtra
from penstock.text.files import kind_of

READERS = ("parquet", "json")  # what `datasets` calls the kinds that penstock.text reads
# Settings of a dataset's card under which `datasets` gives other documents than its files hold.
DECIDING = {"filters", "field", "encoding", "encoding_errors", "on_bad_files", "on_mixed_types"}
ABOUT = {"name", "version", "description", "data_dir", "data_files"}  # say nothing of how to read
COMMIT = re.compile("[0-9a-f]{40}")


@dataclass(frozen=True, slots=True, kw_only=True)
class HubFiles:
    """A split's files in order. `plain`: the whole of them, of kinds that `penstock.text` reads."""

    dataset: str
    config: str | None  # as it was asked for
    split: str
    revision: str | None  # a commit of the Hub; None on this disk
    paths: tuple[str, ...]
    stamps: tuple[str, ...]  # another one when a file's content is; commits pin the Hub's
    plain: bool
    reading: str  # what `datasets` reads them as, and its settings where they are not plain

    @property
    def title(self) -> str:
        """The dataset as errors name it.

        >>> files = {"revision": None, "paths": (), "stamps": (), "plain": True, "reading": "json"}
        >>> HubFiles(dataset="allenai/c4", config="en", split="train", **files).title
        "split 'train' of allenai/c4 (en)"
        """
        return f"split {self.split!r} of {_named(self.dataset, self.config)}"


def sources_of(
    dataset_name: str,
    dataset_config: str | None = None,
    split: str = "train",
    *,
    revision: str | None = None,
) -> HubFiles:
    """The files of a split, of a directory here or of a dataset of the Hub.

    `revision` is a branch, a tag or a commit; without it, the commit that "main" is now.
    """
    config = dataset_config or None
    remembered = _remembered(dataset_name, config, split, revision)
    if remembered is not None:
        return remembered
    builder = _builder(dataset_name, config, revision)
    found = _files(builder, dataset_name, config, split)
    if found.revision is not None:
        _remember(found, revision)
    return found


def library() -> Any:
    """The module `datasets`."""
    try:
        import datasets  # noqa: PLC0415 - an extra, and heavy
    except ImportError:
        raise MissingExtra(
            "datasets of Hugging Face need the libraries datasets and huggingface_hub: "
            "pip install 'penstock[hub]'"
        ) from None
    return datasets


def said(error: Exception) -> str:
    r"""What a library complains of, in one line.

    >>> said(ValueError("Config name is missing.\nPlease pick one among: ['a', 'b']"))
    "Config name is missing. Please pick one among: ['a', 'b']"
    """
    words = " ".join(str(error).split("\nExample of usage")[0].split())
    return words[:600] or type(error).__name__


def _named(dataset: str, config: str | None) -> str:
    return f"{dataset} ({config})" if config else dataset


def _builder(name: str, config: str | None, revision: str | None) -> Any:
    """What `datasets` makes of a name; its complaints become ours."""
    datasets, title = library(), _named(name, config)
    if name.isidentifier() and find_spec(f"datasets.packaged_modules.{name}"):
        raise ConfigError(
            f"{name} is a format to `datasets`, not a dataset: name a directory (as ./{name}) or a "
            "dataset of the Hub"
        )
    if Path(name).is_dir() and revision is not None:
        raise ConfigError(f"{name} is a directory here, which has no revision {revision!r}")
    try:
        return datasets.load_dataset_builder(name, config, revision=revision)
    except FileNotFoundError as error:
        raise MissingData(
            f"{title} can be read neither as a directory here nor from the Hub: {said(error)}"
        ) from error
    except OSError as error:  # no connection, no access, offline
        raise MissingData(
            f"{title} is no directory here, and the Hub cannot be asked for it: {said(error)}"
        ) from error
    except (ValueError, RuntimeError) as error:  # a config that it has not, a script
        raise ConfigError(f"{title} cannot be loaded: {said(error)}") from error


def _files(builder: Any, name: str, config: str | None, split: str) -> HubFiles:
    """The files of a split among those that a builder has resolved."""
    revision = None if builder.repo_id is None else str(builder.hash)
    there: Mapping[str, Any] = builder.config.data_files or {}
    known = {str(each): [str(file) for file in files] for each, files in there.items()}
    if not known:  # a dataset that `datasets` itself had prepared, found in its cache offline
        known = {str(each): [] for each in builder.info.splits or ()}
    chosen = list(known) if split == "all" else _splits_in(split)
    for each in chosen:
        if each not in known:
            raise ConfigError(
                f"{_named(name, config)} has no split {each!r}; its splits: {', '.join(known)}"
            )
    paths = tuple(file for each in chosen for file in known[each])
    reader = type(builder).__module__.rpartition(".")[2]
    settings = _settings(builder.config)
    plain = (
        split in known
        and reader in READERS
        and not settings.keys() & DECIDING
        and bool(paths)
        and all(map(_readable, paths))
    )
    return HubFiles(
        dataset=name,
        config=config,
        split=split,
        revision=revision,
        paths=paths,
        stamps=tuple(_stamp(path) for path in paths),
        plain=plain,
        reading=reader if plain else f"{reader} {sorted(settings.items())}",
    )


def _splits_in(split: str) -> list[str]:
    """The splits that an instruction names.

    >>> _splits_in("train[:10%]+test")
    ['train', 'test']
    """
    return [each.partition("[")[0].strip() for each in split.split("+")]


def _settings(config: Any) -> dict[str, str]:
    """How a builder reads its files, where that is not its kind's usual way."""
    values = {each.name: repr(getattr(config, each.name)) for each in fields(config)}
    usual = {each.name: repr(each.default) for each in fields(config)}
    return {
        name: value for name, value in values.items() if value != usual[name] and name not in ABOUT
    }


def _readable(path: str) -> bool:
    if "::" in path:  # in an archive
        return False
    try:
        kind_of(path, path)
    except ConfigError:
        return False
    return True


def _stamp(path: str) -> str:
    if "://" in path:
        return ""
    stat = Path(path).stat()
    return f"{stat.st_size}-{stat.st_mtime_ns}"


# ---------------------------------------------------------------------------------- remembering


def _note(name: str, config: str | None, split: str, revision: str | None) -> Path:
    asked = json.dumps([name, config, split, revision])
    digest = blake2b(asked.encode(), digest_size=12).hexdigest()
    return cache_folder("hub") / "resolved" / f"{digest}.json"


def _remember(found: HubFiles, revision: str | None) -> None:
    raw = json.dumps(asdict(found)).encode()
    for each in {revision, found.revision}:
        note = _note(found.dataset, found.config, found.split, each)
        with suppress(OSError):  # a cache that cannot be written to: asked again next time
            note.parent.mkdir(parents=True, exist_ok=True)
            write_whole(note, raw)


def _remembered(name: str, config: str | None, split: str, revision: str | None) -> HubFiles | None:
    """What was resolved before, where it cannot have changed or where nobody can be asked."""
    if Path(name).is_dir():
        return None
    pinned = revision is not None and COMMIT.fullmatch(revision)
    if not pinned and not library().config.HF_HUB_OFFLINE:
        return None
    try:
        values = json.loads(_note(name, config, split, revision).read_bytes())
        values |= {key: tuple(values[key]) for key in ("paths", "stamps")}
        return HubFiles(**values)
    except (OSError, ValueError, TypeError, KeyError):
        return None  # none, or one that another version wrote
