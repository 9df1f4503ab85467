"""Documents in, and the tokenizers that read them. So far: what a tokenizer's files state."""

from penstock.text.tokenizer_files import eos_token_id, vocab_size

__all__ = ["eos_token_id", "vocab_size"]
