"""What a tokenizer's own files say of it, without loading it: the EOS id and the vocabulary's size.

Read are `tokenizer.json` (vocabulary and added tokens), `tokenizer_config.json` and
`special_tokens_map.json` (which token is EOS), from a folder or beside a `tokenizer.json`.
"""

from __future__ import annotations

import json
import operator
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError, DataError, MissingData


def eos_token_id(tokenizer_path: str | Path) -> int:
    """The id of the token that ends a document."""
    folder, ids = _vocabulary(tokenizer_path)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        token = _json(folder / name).get("eos_token") if (folder / name).exists() else None
        if isinstance(token, dict):
            token = token.get("content")
        if token is None:
            continue
        if not isinstance(token, str) or token not in ids:
            raise DataError(
                f"{folder / name} names {token!r} as EOS, which is not in tokenizer.json"
            )
        return ids[token]
    raise ConfigError(
        f"{folder} names no eos_token in tokenizer_config.json or special_tokens_map.json: "
        "add it there"
    )


def vocab_size(tokenizer_path: str | Path) -> int:
    """One more than the highest id."""
    _, ids = _vocabulary(tokenizer_path)
    return max(ids.values()) + 1


def _vocabulary(tokenizer_path: str | Path) -> tuple[Path, dict[str, int]]:
    path = Path(tokenizer_path)
    file = path if path.is_file() else path / "tokenizer.json"
    if not file.exists():
        raise MissingData(
            f"{tokenizer_path} is neither a tokenizer.json nor a folder that holds one"
        )
    content = _json(file)
    try:
        vocab = content["model"]["vocab"]
        if isinstance(vocab, list):  # unigram: [token, score] in order of id
            vocab = {row[0]: i for i, row in enumerate(vocab)}
        ids = {str(token): operator.index(i) for token, i in vocab.items()}
        added = content.get("added_tokens") or []
        ids |= {str(token["content"]): operator.index(token["id"]) for token in added}
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise DataError(
            f"{file} has no vocabulary where tokenizer.json keeps it: {error!r}"
        ) from None
    if not ids:
        raise DataError(f"{file} has an empty vocabulary")
    return file.parent, ids


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, OSError, RecursionError) as error:
        raise DataError(f"{file} cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise DataError(f"{file} should hold a JSON object, and holds a {type(content).__name__}")
    return content
