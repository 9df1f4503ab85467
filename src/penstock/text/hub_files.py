"""A tokenizer of the Hugging Face Hub, by its name: "Qwen/Qwen3-0.6B" to a folder of its files.

The Hub's own cache is looked in first, so what was fetched once opens without a network, and the
same.
"""

from __future__ import annotations

import re
from pathlib import Path

from penstock.errors import MissingData, MissingExtra

FILES = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
]
PART = r"[A-Za-z0-9](?:[\w.-]{0,94}[A-Za-z0-9])?"
NAME = re.compile(f"{PART}/{PART}|gpt2", re.ASCII)


def hub_folder(name: str) -> Path | None:
    """The folder in the Hub's cache that holds this repository's tokenizer; None if it is no name.

    >>> hub_folder("./no/such/folder") is None
    True
    """
    if not NAME.fullmatch(name) or name.endswith((".json", ".tiktoken", ".pkl")):
        return None
    try:
        from huggingface_hub import snapshot_download  # noqa: PLC0415 - heavy
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError  # noqa: PLC0415
    except ImportError:
        raise MissingExtra(
            f"{name} is no file or folder here, and a name of the Hub needs huggingface_hub: "
            "pip install huggingface_hub"
        ) from None
    why: object = "it has no tokenizer.json"
    for local in (True, False):
        try:
            folder = Path(snapshot_download(name, allow_patterns=FILES, local_files_only=local))
        except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
            why = str(error).strip().partition("\n")[0] or type(error).__name__
        else:
            if (folder / "tokenizer.json").is_file():
                return folder
            why = "it has no tokenizer.json"
    raise MissingData(
        f"{name} is no file or folder here, and from the Hub it cannot be had ({why}): "
        "give the folder of a downloaded tokenizer, or a name that `hf download` can fetch"
    )
