"""What a tokenizer's own files say of it, without loading it: ids, EOS, size, chat template.

    define("tokenizers/mine").eos_id          # a folder with tokenizer.json
    define("cl100k_base.tiktoken").vocab_size     # ranks; the regex follows from the name
    define("Qwen/Qwen3-0.6B").chat_template       # a name of the Hub, through its cache

`tokenizer.json` holds the vocabulary; beside it `tokenizer_config.json`, `special_tokens_map.json`
and `generation_config.json` say which tokens are BOS, EOS and PAD, in this order of precedence.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError, DataError, MissingData
from penstock.text import tiktoken_files
from penstock.text.definition import Definition, deciding_content, read_json, read_vocabulary
from penstock.text.hub_files import hub_folder

NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
STATED_BY = ("tokenizer_config.json", "special_tokens_map.json")


def eos_token_id(tokenizer_path: str | Path) -> int:
    """The id of the token that ends a document."""
    definition = define(tokenizer_path)
    if definition.eos_id is None:
        raise ConfigError(
            f"{tokenizer_path} names no eos_token in tokenizer_config.json or "
            "special_tokens_map.json: add it there"
        )
    return definition.eos_id


def vocab_size(tokenizer_path: str | Path) -> int:
    """One more than the highest id."""
    return define(tokenizer_path).vocab_size


def define(path: str | os.PathLike[str], *, trust_pickle: bool = False) -> Definition:
    """What the files at `path`, or those of the Hub's repository of that name, say."""
    place = Path(path)
    if place.is_dir():
        if (place / "tokenizer.json").exists():
            return _define_json(place / "tokenizer.json")
        others = sorted([*place.glob("*.tiktoken"), *place.glob("tokenizer.pkl")])
        if len(others) == 1:
            return define(others[0], trust_pickle=trust_pickle)
    elif place.is_file():
        match place.suffix:
            case ".tiktoken":
                return tiktoken_files.define_ranks(place)
            case ".pkl":
                return tiktoken_files.define_pickle(place, trust_pickle=trust_pickle)
            case _:
                return _define_json(place)
    else:
        folder = hub_folder(os.fspath(path))
        if folder is not None:
            return define(folder)
    raise MissingData(
        f"{os.fspath(path)} is neither a tokenizer.json nor a folder that holds one, nor a "
        ".tiktoken file, nor a repository on the Hub"
    )


def _define_json(file: Path) -> Definition:
    content, folder = read_json(file), file.parent
    ids = read_vocabulary(content, file)
    stated = [(folder / name, read_json(folder / name)) for name in STATED_BY if _is(folder / name)]
    named = {name: token for name in NAMES if (token := _named(name, ids, stated)) is not None}
    specials = set(named.values())
    for _, said in stated:
        for key in ("additional_special_tokens", "extra_special_tokens"):
            more = said.get(key) or []
            tokens = list(more.values()) if isinstance(more, dict) else more
            specials |= {text for token in tokens if isinstance(text := _text(token), str)}
    generation = folder / "generation_config.json"
    fallback = read_json(generation) if _is(generation) else {}
    numbers = {
        name: ids.get(named[name]) if name in named else _generation_id(fallback, name, generation)
        for name in NAMES[:3]
    }
    return Definition(
        path=str(file.absolute()),
        content=deciding_content(content, ids, specials, file),
        ids=ids,
        named=named,
        bos_id=numbers["bos_token"],
        eos_id=numbers["eos_token"],
        pad_id=numbers["pad_token"],
        chat_template=_chat_template(folder, stated),
    )


def _named(name: str, ids: dict[str, int], stated: list[tuple[Path, dict[str, Any]]]) -> str | None:
    """The text of a named token, from the first file that names it."""
    for file, said in stated:
        token = _text(said.get(name))
        if token is None:
            continue
        if isinstance(token, str) and (token in ids or name not in ("bos_token", "eos_token")):
            return token
        role = name.removesuffix("_token").upper()
        raise DataError(f"{file} names {token!r} as {role}, which is not in tokenizer.json")
    return None


def _text(token: object) -> object:
    """The text of a token given as a string or as a dict."""
    return token.get("content") if isinstance(token, dict) else token


def _generation_id(fallback: dict[str, Any], name: str, file: Path) -> int | None:
    """An id that generation_config.json states; the first of several."""
    value = fallback.get(f"{name}_id")
    if isinstance(value, list):
        value = value[0] if value else None
    if value is not None and (type(value) is not int or value < 0):
        raise DataError(f"{file} has {value!r} as {name}_id, which should be an id")
    return value


def _chat_template(folder: Path, stated: list[tuple[Path, dict[str, Any]]]) -> str | None:
    """The chat template: chat_template.jinja, else the config's, of several the "default" one."""
    if _is(folder / "chat_template.jinja"):
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    for file, said in stated:
        template = said.get("chat_template")
        if isinstance(template, list):
            try:
                by_name = {entry["name"]: entry["template"] for entry in template}
            except (KeyError, TypeError):
                by_name = {}
            if "default" not in by_name:
                raise DataError(
                    f"{file} has chat templates {sorted(by_name)}, and none of them is 'default': "
                    "write the one to use to chat_template.jinja"
                )
            template = by_name["default"]
        if template is not None and not isinstance(template, str):
            raise DataError(
                f"{file} has a {type(template).__name__} as chat_template, which should be a string"
            )
        if template is not None:
            return template
    return None


def _is(file: Path) -> bool:
    return file.is_file()
