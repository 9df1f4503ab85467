"""Documents in, each with its address; and the tokenizers that read them.

`documents` and `files` find and read · `tokenizer` encodes · `template` renders chats. What a
tokenizer's files state is here at once; `open_tokenizer` is imported when it is asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from penstock.text.tokenizer_files import eos_token_id, vocab_size

if TYPE_CHECKING:
    from penstock.text.tokenizer import open_tokenizer

__all__ = ["eos_token_id", "open_tokenizer", "vocab_size"]


def __getattr__(name: str) -> Any:
    if name == "open_tokenizer":
        return import_module("penstock.text.tokenizer").open_tokenizer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
