"""Tokenizers, templates and conversations for the tests of `prepare`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as HFTokenizer

Specials = Literal["text", "parse"]

CORPUS = [
    "hello world, hi there! You are helpful. What is 2+2? It is four.",
    "Tell me a long story about dragons and knights. Sure, here is a tale.",
    "system user assistant tool model ipython [INST] [/INST] Translate to French: Bonjour",
] * 3


class Adapter:
    """HF's `tokenizers` as the interface that `prepare` expects."""

    backend = "tokenizers"
    content_hash = "0"

    def __init__(
        self,
        inner: HFTokenizer,
        *,
        bos: str | None = None,
        eos: str | None = None,
        chat_template: str | None = None,
    ) -> None:
        self.inner = inner
        self.name = "test"
        self.bos_id = None if bos is None else inner.token_to_id(bos)
        self.eos_id = None if eos is None else inner.token_to_id(eos)
        self.pad_id = None
        self.vocab_size = inner.get_vocab_size()
        self.specials = {
            token.content: i
            for i, token in inner.get_added_tokens_decoder().items()
            if token.special
        }
        self.chat_template = chat_template
        named = {"bos_token": bos, "eos_token": eos}
        self.special_tokens_map = {name: text for name, text in named.items() if text}
        self.calls: list[tuple[str, Specials, int]] = []

    def _encodings(self, texts: Any, specials: Specials, how: str) -> list[Any]:
        self.calls.append((how, specials, len(texts)))
        self.inner.encode_special_tokens = specials == "text"
        try:
            return self.inner.encode_batch(list(texts), add_special_tokens=False)
        finally:
            self.inner.encode_special_tokens = False

    def encode(
        self, texts: Any, *, specials: Specials = "text"
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
        return ragged([e.ids for e in self._encodings(texts, specials, "encode")])

    def encode_spans(
        self, texts: Sequence[str], *, specials: Specials = "text"
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        found = self._encodings(texts, specials, "spans")
        ids, offsets = ragged([e.ids for e in found])
        places = [np.array(e.offsets, np.int64).reshape(-1, 2) for e in found]
        return ids, offsets, np.concatenate(places or [np.empty((0, 2), np.int64)])

    def decode(self, ids: npt.ArrayLike) -> str:
        return str(self.inner.decode(np.asarray(ids).tolist(), skip_special_tokens=False))


def ragged(
    lists: Sequence[Sequence[int]],
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
    offsets = np.cumsum([0, *map(len, lists)])
    return np.array([i for found in lists for i in found], np.uint32), offsets.astype(np.int64)


@cache
def byte_level(specials: tuple[str | AddedToken, ...], *, trim: bool = False) -> HFTokenizer:
    """A small byte-level BPE, as GPT-2's; `trim` leaves blanks out of its spans, as GPT-2's."""
    found = HFTokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        special_tokens=[],
    )
    found.train_from_iterator(CORPUS, trainer)
    found.add_special_tokens(list(specials))
    if trim:
        found.post_processor = processors.ByteLevel(trim_offsets=True)
    return found


@cache
def spaced(specials: tuple[str, ...], scheme: str = "first") -> HFTokenizer:
    """A small BPE in SentencePiece's manner: blanks are ▁, and texts begin with one."""
    found = HFTokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    found.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    found.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
    alphabet = sorted({c for line in CORPUS for c in line} - {" "})
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        initial_alphabet=[*alphabet, "\n", "<", "|", ">", "/", "_"],
        special_tokens=["<unk>", *(f"<0x{b:02X}>" for b in range(256))],
        show_progress=False,
    )
    found.train_from_iterator([w for line in CORPUS for w in line.split()], trainer)
    state = found.to_str().replace('"special":true', '"special":false')
    found = HFTokenizer.from_str(state)
    found.add_special_tokens(["<unk>", *specials])
    return found


# ------------------------------------------------------------------ templates in the known styles

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>'"
    " + '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% endif %}"
)
CHATML_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

CHATML_BLOCKS = """\
{%- for m in messages %}
  {%- if m.role == 'assistant' %}
    {{- '<|im_start|>assistant\n' }}
    {%- generation %}
      {{- m.content }}
      {%- for call in m.tool_calls or [] %}
        {{- '<tool_call>' }}{{ call.function | tojson }}{{ '</tool_call>' }}
      {%- endfor %}
      {{- '<|im_end|>' }}
    {%- endgeneration %}
    {{- '\n' }}
  {%- else %}
    {{- '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""

LLAMA3 = """\
{{- bos_token }}
{%- for m in messages %}
  {{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' }}
  {{- m['content'] | trim }}
  {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""
LLAMA3_SPECIALS = (
    "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>",
)  # fmt: skip

MISTRAL = """\
{{- bos_token }}
{%- for m in messages %}
  {%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
    {{- raise_exception('Roles must alternate user, assistant, user, assistant.') }}
  {%- endif %}
  {%- if m['role'] == 'user' %}
    {{- '[INST] ' + m['content'] + ' [/INST]' }}
  {%- else %}
    {{- ' ' + m['content'] + eos_token }}
  {%- endif %}
{%- endfor %}
"""
MISTRAL_SPECIALS = ("<s>", "</s>")

GEMMA = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
  {{- raise_exception('There is no role for a system prompt.') }}
{%- endif %}
{%- for m in messages %}
  {%- set role = 'model' if m['role'] == 'assistant' else m['role'] %}
  {{- '<start_of_turn>' + role + '\n' + m['content'] | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}
"""
GEMMA_SPECIALS = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")

# Like Qwen3's: what was thought in earlier turns is forgotten.
FORGETFUL = """\
{%- for m in messages %}
  {{- '<|im_start|>' + m.role + '\n' }}
  {%- if m.role == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
  {{- m.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""


def chatml(template: str = CHATML, *, trim: bool = False) -> Adapter:
    inner = byte_level(CHATML_SPECIALS, trim=trim)
    return Adapter(inner, eos="<|im_end|>", chat_template=template)


def llama3(template: str | None = LLAMA3) -> Adapter:
    inner = byte_level(LLAMA3_SPECIALS)
    bos, eos = "<|begin_of_text|>", "<|end_of_text|>"
    return Adapter(inner, bos=bos, eos=eos, chat_template=template)


def mistral(template: str = MISTRAL, scheme: str = "first") -> Adapter:
    inner = spaced(MISTRAL_SPECIALS, scheme)
    return Adapter(inner, bos="<s>", eos="</s>", chat_template=template)


def gemma() -> Adapter:
    inner = byte_level(GEMMA_SPECIALS)
    return Adapter(inner, bos="<bos>", eos="<eos>", chat_template=GEMMA)


def talk(*turns: str, first: str = "user") -> list[dict[str, Any]]:
    """A conversation whose speakers take turns."""
    roles = ["user", "assistant"] if first == "user" else ["assistant", "user"]
    return [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]


def marked(tokenizer: Adapter, ids: npt.ArrayLike, mask: npt.ArrayLike) -> str:
    """A sequence with what is trained of it in ⟦ ⟧, for examples marked by hand."""
    found, trained = np.asarray(ids), np.asarray(mask)
    assert found.shape == trained.shape
    edges = np.flatnonzero(np.diff(trained.astype(np.int8), prepend=0, append=0)).tolist()
    text, at = "", 0
    for begin, end in zip(edges[::2], edges[1::2], strict=True):
        text += f"{tokenizer.decode(found[at:begin])}⟦{tokenizer.decode(found[begin:end])}⟧"
        at = end
    return text + tokenizer.decode(found[at:])
