"""Documents in, and the tokenizers that read them.

Here is what a tokenizer's files state, for which nothing heavy is imported; `open_tokenizer` is in
`penstock.text.tokenizer`.
"""

from penstock.text.tokenizer_files import eos_token_id, vocab_size

__all__ = ["eos_token_id", "vocab_size"]
