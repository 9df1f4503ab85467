"""The tokens of a dataset's split, as a store in the cache: made once, by one process, then mapped.

    ~/.cache/penstock/hub/
      fineweb-train-1c5b…/               a store, named by all that decides its tokens
      .fineweb-train-1c5b….lock          held by the process that makes it, until it ends or dies
      .fineweb-train-1c5b….documents/    what only `datasets` can read, as Parquet, for that time

Whoever comes while the store is being made waits for the lock, and finds it made. If the maker was
killed, the next process goes on from the works that are complete.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import re
import shutil
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from penstock.cache import cache_folder, locked, sync_directory
from penstock.errors import ConfigError, DataError
from penstock.hub.sources import HubFiles, library, said
from penstock.prepare.config import PipelineConfig
from penstock.prepare.pipeline import Pipeline
from penstock.prepare.preparation import tokenizer_facts
from penstock.prepare.tally import Progress
from penstock.store.manifest import MANIFEST
from penstock.text.documents import Policy, read_records, units_of
from penstock.text.files import find_files
from penstock.text.parquet import columns_of

HUB_VERSION = 1  # of what is written for the same documents
ROWS = 256  # documents that are held at once on their way through Parquet
LOG = logging.getLogger(__name__)


def recipe_of(text_field: str) -> PipelineConfig:
    """Each document that has a token, whole, and EOS after it; no BOS.

    >>> recipe_of("text").preprocessing.max_seq_len is None
    True
    """
    section = {"field": text_field, "action": "train", "append_eos": True}
    limits = {"max_seq_len": None, "min_chars": 0, "max_chars": 2**62, "keep_blank": True}
    return PipelineConfig.from_dict(
        {
            "input": {"sections": [{**section, "add_special_tokens": False}]},
            "preprocessing": limits,
        }
    )


def store_of(
    files: HubFiles,
    text_field: str,
    tokenizer_path: str | os.PathLike[str],
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    workers: int | None = None,
    backend: str = "auto",
    policy: Policy = "error",
) -> Path:
    """Where the store of a split's tokens stands; it is made if it does not yet."""
    facts, kind = tokenizer_facts(tokenizer_path)
    if "eos_token_id" not in facts:
        raise ConfigError(
            f"{os.fspath(tokenizer_path)} names no eos_token, and documents have to end with one: "
            "add it to its tokenizer_config.json"
        )
    recipe = recipe_of(text_field)
    name = _name(
        files,
        {
            "version": HUB_VERSION,
            "commit": files.revision and [files.dataset, files.config, files.revision],
            "files": [files.split, files.paths, files.stamps, files.reading],
            "recipe": recipe.to_dict(),
            "tokenizer": kind,
            "policy": policy,
        },
    )
    folder = (cache_folder("hub") if cache_dir is None else Path(cache_dir)).absolute()
    store, documents = folder / name, folder / f".{name}.documents"
    left = documents.exists() and os.access(folder, os.W_OK)  # by a process that was killed
    if (store / MANIFEST).exists() and not left:
        return store
    _check_not_imported_by_a_worker()
    _check_writable(folder)
    with locked(folder / f".{name}.lock", wait=True):
        if not (store / MANIFEST).exists():  # else another process was first
            inputs = _inputs(files, text_field, store, documents)
            pipeline = Pipeline(
                recipe,
                inputs,
                store,
                tokenizer_path,
                workers=workers,
                backend=backend,
                policy=policy,
            )
            pipeline.run(_told(files, store))
        shutil.rmtree(documents, ignore_errors=True)
    return store


def documents_of(
    files: HubFiles, text_field: str, cache_dir: str | os.PathLike[str] | None = None
) -> list[str]:
    """The files to read a split's documents from.

    Where only `datasets` can read them, they are copied to Parquet in the cache, once, and stay.
    """
    if files.plain:
        _check_files(files, text_field, schemas=True)
        return list(files.paths)
    named = {
        "version": HUB_VERSION,
        "commit": files.revision and [files.dataset, files.config, files.revision],
        "files": [files.split, files.paths, files.stamps, files.reading],
        "text_field": text_field,
    }
    folder = (cache_folder("hub") if cache_dir is None else Path(cache_dir)).absolute()
    documents = folder / f"{_name(files, named)}.documents"
    if not documents.exists():
        _check_writable(folder)
        with locked(folder / f".{documents.name}.lock", wait=True):
            if not documents.exists():
                _write_documents(files, text_field, documents)
    return [str(documents)]


def _check_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        raise ConfigError(
            f"{folder}, where tokens of datasets are kept, cannot be written to: set "
            "PENSTOCK_CACHE_DIR to a folder that can"
        )


def _name(files: HubFiles, definition: dict[str, Any]) -> str:
    words = re.sub(r"[^A-Za-z0-9._]+", "-", f"{Path(files.dataset).name}-{files.split}").strip("-.")
    raw = json.dumps(definition, sort_keys=True).encode()
    return f"{words[:60]}-{blake2b(raw, digest_size=10).hexdigest()}"


def _check_not_imported_by_a_worker() -> None:
    """Refuse to wait for a lock that is held by the parent, which waits for this worker."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ConfigError(
            "the workers that tokenize import the script that started them, and it makes the "
            "dataset again: put what it does under `if __name__ == '__main__':`, or pass workers=0"
        )


def _inputs(files: HubFiles, text_field: str, store: Path, documents: Path) -> list[str]:
    """What is to be tokenized, its field checked before any worker is started."""
    if files.plain:
        _check_files(files, text_field)
        return list(files.paths)
    if not documents.exists():
        shutil.rmtree(store, ignore_errors=True)  # begun with documents that are gone
        _write_documents(files, text_field, documents)
    return [str(documents)]


def _told(files: HubFiles, store: Path) -> Callable[[Progress], None]:
    """Log how far it is, about twenty times."""
    LOG.info("tokenizing %s into %s", files.title, store)
    done = 0

    def told(progress: Progress) -> None:
        nonlocal done
        share = 20 * progress.bytes // max(progress.total, 1)
        if share > done:
            done = share
            LOG.info("%s: %d%%, %s tokens", files.title, 5 * share, f"{progress.tally.tokens:,}")

    return told


def _check_files(files: HubFiles, text_field: str, *, schemas: bool = False) -> None:
    """Refuse files that are others by now, and a field that the first documents have not.

    With `schemas`, Parquet is judged by its columns' types, and no document of it is read.
    """
    inputs = find_files(files.paths)
    known = dict(zip(files.paths, files.stamps, strict=True))
    for file in inputs:
        if known.get(file.path) not in ("", file.stamp):
            raise DataError(f"{file.path} is being changed: let it be finished, and start again")
    if schemas and inputs[0].kind == "parquet":
        kinds = columns_of(inputs[0])
        _check_column(files, text_field, list(kinds), kinds.get(text_field))
        return
    for unit in units_of(inputs):
        for batch in read_records(inputs[unit.file], unit, policy="reject"):
            if batch.records:
                columns = list(dict.fromkeys(key for each in batch.records for key in each))
                found = [each.get(text_field) for each in batch.records]
                _check_field(files, text_field, columns, found)
            if batch.records or batch.rejects:
                return  # where all are damaged, the run itself says of what
    raise DataError(f"{files.title} holds no documents")


def _check_field(
    files: HubFiles, text_field: str, columns: Sequence[str], found: Sequence[Any]
) -> None:
    """Refuse a field that there is not, or that holds no text, by its first values."""
    others = {type(value).__name__ for value in found if value is not None}
    text = not others or others & {"str", "bytes"}
    _check_column(files, text_field, columns, None if text else " or ".join(sorted(others)))


def _check_column(
    files: HubFiles, text_field: str, columns: Sequence[str], other: str | None
) -> None:
    """Refuse a column that there is not, or that is something `other` than text."""
    choices = f"its columns: {', '.join(columns)}"
    if text_field not in columns:
        raise ConfigError(f"{files.title} has no column {text_field!r} to read; {choices}")
    if other:
        raise ConfigError(f"{text_field!r} of {files.title} is {other}, not text; {choices}")


def _write_documents(files: HubFiles, text_field: str, documents: Path) -> None:
    """What `datasets` reads of a split, as a Parquet file of its text alone."""
    import pyarrow as pa  # noqa: PLC0415 - for this way alone
    import pyarrow.parquet as pq  # noqa: PLC0415

    rows = _loaded(files)
    if not len(rows):
        raise DataError(f"{files.title} holds no documents")
    _check_field(files, text_field, rows.column_names, rows[:ROWS].get(text_field, []))
    texts = rows.select_columns([text_field]).with_format("arrow")
    schema = pa.schema([(text_field, texts.features.arrow_schema.field(text_field).type)])
    unfinished = documents.with_name(f"{documents.name}.part")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        with pq.ParquetWriter(unfinished / "documents.parquet", schema) as writer:
            for batch in texts.iter(batch_size=ROWS):
                writer.write_table(_without_nulls(batch).cast(schema))
    except OSError as error:  # a full disk
        shutil.rmtree(unfinished, ignore_errors=True)
        raise DataError(f"{files.title} cannot be copied to {unfinished}: {said(error)}") from error
    unfinished.rename(documents)
    sync_directory(documents.parent)


def _without_nulls(batch: Any) -> Any:
    """A table of one column of text; an empty cell of a CSV file is null to `datasets`."""
    import pyarrow.compute as pc  # noqa: PLC0415

    if not batch.column(0).null_count:
        return batch
    return batch.set_column(0, batch.field(0), pc.fill_null(batch.column(0), ""))


def _loaded(files: HubFiles) -> Any:
    """The split as `datasets` loads it: Arrow files in its own cache, mapped."""
    datasets = library()
    try:
        return datasets.load_dataset(
            files.dataset, files.config, split=files.split, revision=files.revision
        )
    except ValueError as error:
        raise ConfigError(f"{files.title} cannot be loaded: {said(error)}") from error
    except (OSError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"{files.title} cannot be loaded: {said(error)}") from error
