"""Small tokenizers of the families people use, trained on the standard library's own text.

    path = gpt2_like()          # a folder with tokenizer.json and tokenizer_config.json

Each is made once a process, takes about a second, and is a folder like those on the Hub.
"""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    processors,
    trainers,
)
from tokenizers import pre_tokenizers as pre

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
CL100K = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + SPACES
QWEN = CL100K.replace(r"\p{N}{1,3}", r"\p{N}")
O200K = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        + CONTRACTIONS
        + "?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        + CONTRACTIONS
        + "?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        SPACES,
    ]
)
# A little of many scripts, so that merges reach beyond ASCII.
WORLD = (
    "Größe naïve façade Ελληνικά Русский текст עברית العربية हिन्दी ไทย 日本語の文章 中文分词 "
    "한국어 Ünïcödé e\u0301 ﬁne 👩‍👩‍👧 🇩🇪 ½ ② ٣ “quoted” — … 3.14159 0xFF\n"
)


@functools.cache
def stdlib_texts(characters: int = 300_000) -> tuple[str, ...]:
    """Modules of the standard library, in order, up to so many characters."""
    texts, total = [WORLD * 3], 0
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = file.read_text(encoding="utf-8")[:20_000]
        texts.append(text)
        total += len(text)
        if total > characters:
            break
    return tuple(texts)


def _byte_level(
    pre_tokenizer: pre.PreTokenizer, *, vocab: int = 3000, ignore_merges: bool = False
) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    alphabet = sorted(pre.ByteLevel.alphabet())
    tokenizer.train_from_iterator(
        stdlib_texts(),
        trainers.BpeTrainer(vocab_size=vocab, initial_alphabet=alphabet, show_progress=False),
    )
    return tokenizer


def _split(pattern: str) -> pre.PreTokenizer:
    split = pre.Split(Regex(pattern), behavior="isolated", invert=False)
    return pre.Sequence([split, pre.ByteLevel(add_prefix_space=False, use_regex=False)])


def _save(name: str, tokenizer: Tokenizer, config: dict[str, Any]) -> Path:
    folder = Path(tempfile.mkdtemp(prefix=f"penstock-{name}-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@functools.cache
def gpt2_like() -> Path:
    """GPT-2: its regex, one special token at the end that is EOS."""
    tokenizer = _byte_level(pre.ByteLevel(add_prefix_space=False))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    end = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
    return _save("gpt2", tokenizer, end)


@functools.cache
def cl100k_like() -> Path:
    """cl100k: digits by threes, newlines kept with what they end."""
    tokenizer = _byte_level(_split(CL100K))
    tokenizer.add_special_tokens(["<|endoftext|>", "<|fim_prefix|>", "<|endofprompt|>"])
    return _save("cl100k", tokenizer, {"eos_token": "<|endoftext|>"})


@functools.cache
def o200k_like() -> Path:
    """o200k: words split where lower case turns to upper."""
    tokenizer = _byte_level(_split(O200K))
    tokenizer.add_special_tokens(["<|endoftext|>", "<|endofprompt|>"])
    return _save("o200k", tokenizer, {"eos_token": "<|endoftext|>"})


@functools.cache
def llama3_like() -> Path:
    """Llama 3: whole words before merges, and a post-processor that would add BOS."""
    tokenizer = _byte_level(_split(CL100K), ignore_merges=True)
    names = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"]
    tokenizer.add_special_tokens([*names, "<|eot_id|>"])
    bos = tokenizer.token_to_id("<|begin_of_text|>")
    template = processors.TemplateProcessing(
        single="<|begin_of_text|> $A",
        pair="<|begin_of_text|> $A <|begin_of_text|> $B",
        special_tokens=[("<|begin_of_text|>", bos)],
    )
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(), template])
    config = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
    return _save("llama3", tokenizer, config)


@functools.cache
def qwen_like() -> Path:
    """Qwen: digits one by one, NFC, ChatML, and added tokens of which some are not special."""
    tokenizer = _byte_level(_split(QWEN))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in ("<tool_call>", "</tool_call>")])
    tokenizer.add_special_tokens(["<|vision_start|>"])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in ("<think>", "</think>")])
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    )
    pad = {"__type": "AddedToken", "content": "<|endoftext|>", "lstrip": False, "special": True}
    return _save(
        "qwen", tokenizer, {"eos_token": "<|im_end|>", "pad_token": pad, "chat_template": template}
    )


@functools.cache
def llama2_like() -> Path:
    """SentencePiece BPE as converted for Llama 2: byte fallback, ▁ for spaces, <s> and </s>."""
    specials = ["<unk>", "<s>", "</s>"]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    pieces = specials + [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=2500, special_tokens=pieces, show_progress=False)
    words = [word for text in stdlib_texts() for word in text.split(" ")]
    tokenizer.train_from_iterator(words, trainer)
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = content["added_tokens"][:3]  # bytes are pieces, not added tokens
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return _save("llama2", tokenizer, config)


@functools.cache
def unigram_like() -> Path:
    """SentencePiece Unigram, as T5's: Metaspace, scores, and </s> among the pieces."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=1500,
        special_tokens=["<pad>", "</s>", "<unk>"],
        unk_token="<unk>",
        show_progress=False,
    )
    tokenizer.train_from_iterator(stdlib_texts(100_000), trainer)
    config = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return _save("unigram", tokenizer, config)


FAMILIES: dict[str, Callable[[], Path]] = {
    "gpt2": gpt2_like,
    "cl100k": cl100k_like,
    "o200k": o200k_like,
    "llama3": llama3_like,
    "qwen": qwen_like,
    "llama2": llama2_like,
    "unigram": unigram_like,
}
BYTE_LEVEL = ("gpt2", "cl100k", "o200k", "llama3", "qwen")
