"""Documents to records: the ids of every key of a recipe, and which of them are trained.

    builder = MaskBuilder(recipe("chat"), open_tokenizer("llama-3/"))
    builder.build([{"messages": [...]}])        # [Built(values={"sequence": …, "loss_mask": …}, …)]

Every record has every key, and a mask is as long as what it masks. What makes no record is told
with its reason, never lost. Recipes that only tokenise text (`plain_text`) need no Python object a
document: `sift` and `frame` do the same to arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError
from penstock.pack import framed
from penstock.prepare.config import Output, PipelineConfig, Section
from penstock.prepare.encoding import Encoder, Ids, Mask, Piece
from penstock.prepare.outcome import Built, Dropped, Refused
from penstock.prepare.plain import sifted
from penstock.store.schema import Key, Schema

if TYPE_CHECKING:
    import pyarrow as pa

    from penstock.prepare.conversation import Conversations
    from penstock.text.tokenizer import Tokenizer

Record = Mapping[str, Any]


@dataclass(slots=True)
class _Planned:
    """What one record is made of: for each output its items, each a piece a section; values."""

    items: dict[str, list[list[Piece]]]
    values: dict[str, npt.NDArray[Any]]


class MaskBuilder:
    """Makes records of documents, by a recipe and with a tokenizer.

    `now` is the time that templates which write dates are told; by default that of the making.
    """

    keys: dict[str, Key]
    plain_text: str | None

    def __init__(
        self, config: PipelineConfig, tokenizer: Tokenizer, *, now: datetime | None = None
    ) -> None:
        self.config = config
        self._tokenizer = tokenizer
        self._outputs = config.input.outputs
        if not self._outputs:
            raise ConfigError("The recipe has no input: give input.sections or input.sources.")
        self.keys = dict(_keys(config, self._outputs))
        self._counted = _counted(self.keys, self._outputs, tokenizer.vocab_size)
        self._encoder = Encoder(tokenizer)
        self._conversations = self._templates(now)
        self._plain = config.input.sources is None and self._outputs[0].plain
        self._check_ends()
        sections = self._outputs[0].sections
        self.plain_text = sections[0].field if self._plain and len(sections) == 1 else None

    # ------------------------------------------------------------------ records

    def build(self, records: Sequence[dict[str, Any]]) -> list[Built | Dropped]:
        """A record, or the reason why there is none, for each document."""
        planned: list[_Planned | Dropped] = []
        for record in records:
            try:
                planned.append(self._planned(record))
            except Refused as refused:
                planned.append(Dropped.because(refused))
            except RecursionError:
                deep = Refused("bad_value", "it is nested too deeply")
                planned.append(Dropped.because(deep))
        self._encoder.fill(
            [
                piece
                for plan in planned
                if isinstance(plan, _Planned)
                for items in plan.items.values()
                for item in items
                for piece in item
            ]
        )
        built: list[Built | Dropped] = []
        for plan in planned:
            try:
                built.append(plan if isinstance(plan, Dropped) else self._assembled(plan))
            except Refused as refused:
                built.append(Dropped.because(refused))
        return built

    def _planned(self, record: Any) -> _Planned:
        if not isinstance(record, Mapping):
            raise Refused("bad_value", f"it is a {type(record).__name__}, not an object")
        plan = _Planned({}, {})
        for output in self._outputs:
            if output.value:
                plan.values[output.key] = self._numbers(record, output)
            else:
                plan.items[output.key] = self._items(record, output)
        for key, lead in self._counted.items():
            rewards, items = len(plan.values[key]), len(plan.items[lead])
            if rewards != items:
                raise Refused("bad_value", f"{key} are {rewards} for {items} {lead}")
        if self._plain:
            self._check_length([p for item in plan.items[self._outputs[0].key] for p in item])
        return plan

    def _check_length(self, pieces: Sequence[Piece]) -> None:
        limits = self.config.preprocessing
        length = sum(len(piece.text) for piece in pieces)
        if length < limits.min_chars:
            raise Refused("min_chars", filtered=True)
        if length > limits.max_chars:
            raise Refused("max_chars", filtered=True)
        if not limits.keep_blank and all(not piece.text.strip() for piece in pieces):
            raise Refused("empty", filtered=True)

    def _items(self, record: Record, output: Output) -> list[list[Piece]]:
        """The pieces of a sequence; of every sequence, where the field holds a list of them."""
        values = [_field(record, section.field) for section in output.sections]
        if not output.nested:
            pairs = zip(output.sections, values, strict=True)
            return [[self._piece(s, v, record, s.field) for s, v in pairs]]
        for section, value in zip(output.sections, values, strict=True):
            if not isinstance(value, (list, tuple)):
                raise Refused("bad_value", f"{section.field} is {_kind(value)}, not a list")
        counts = [len(value) for value in values]
        if not counts[0]:
            raise Refused("empty", f"{output.sections[0].field} is an empty list")
        if len(set(counts)) > 1:
            raise Refused("bad_value", f"the lists of {output.key} have {counts} items")
        return [
            [
                self._piece(section, value[i], record, f"{section.field}[{i}]")
                for section, value in zip(output.sections, values, strict=True)
            ]
            for i in range(counts[0])
        ]

    def _piece(self, section: Section, value: Any, record: Record, where: str) -> Piece:
        if not section.template:
            if not isinstance(value, str):
                raise Refused("bad_value", f"{where} is {_kind(value)}, not text")
            return Piece(_valid(value, where), trained=section.action == "train")
        if not isinstance(value, (list, tuple)):
            raise Refused("bad_value", f"{where} is {_kind(value)}, not a list of messages")
        if not value:
            raise Refused("empty", f"{where} has no messages")
        for i, message in enumerate(value):
            if not isinstance(message, Mapping):
                raise Refused("bad_value", f"{where}[{i}] is {_kind(message)}, not a message")
        return self._conversation(section, value, record.get("tools") or None, where)

    def _conversation(self, section: Section, messages: Any, tools: Any, where: str) -> Piece:
        if tools is not None and not (
            isinstance(tools, (list, tuple)) and all(isinstance(t, Mapping) for t in tools)
        ):
            raise Refused("bad_value", f"tools is {_kind(tools)}, not a list of objects")
        assert self._conversations is not None
        chats, prompt = self._conversations, section.add_generation_prompt
        written = chats.written(messages, tools, section.action, prompt=prompt)
        _valid(written.text, where)
        piece = Piece(written.text, written.trained, parse=True)
        both = [messages, tools]
        if self._encoder.spells(both):

            def render(hidden: Any) -> str:
                return chats.written(hidden[0], hidden[1], "mask", prompt=prompt).text

            piece.hidden = self._encoder.hidden(both, render, written.text)
        return piece

    def _numbers(self, record: Record, output: Output) -> npt.NDArray[Any]:
        name = output.sections[0].field
        value = _field(record, name)
        found = list(value) if isinstance(value, (list, tuple)) else [value]
        for number in found:
            if not isinstance(number, (int, float)) or isinstance(number, bool):
                raise Refused("bad_value", f"{name} holds {_kind(number)}, not a number")
        try:
            with np.errstate(over="ignore"):
                array = np.array(found, np.float64).astype(self.keys[output.key].dtype)
        except OverflowError:  # 10**400
            array = np.array([np.inf])
        if not np.isfinite(array).all():
            raise Refused("bad_value", f"{name} holds a number that is not finite or too large")
        return array

    # ------------------------------------------------------------------ sequences

    def _assembled(self, plan: _Planned) -> Built:
        values: dict[str, npt.NDArray[Any] | list[npt.NDArray[Any]]] = {}
        tokens = truncated = 0
        for output in self._outputs:
            if output.value:
                values[output.key] = plan.values[output.key]
                continue
            if self._plain and not any(len(p.ids) for item in plan.items[output.key] for p in item):
                raise Refused("empty", filtered=True)  # EOS alone is no document
            items = [self._sequence(output, pieces) for pieces in plan.items[output.key]]
            tokens += sum(len(ids) for ids, _ in items)
            limit = self.config.preprocessing.max_seq_len
            cut = [(ids[:limit], mask[:limit]) for ids, mask in items]
            truncated += sum(len(a) - len(b) for (a, _), (b, _) in zip(items, cut, strict=True))
            if not output.nested and not len(cut[0][0]):
                raise Refused("empty", f"{output.key} has no tokens")
            if output.trained and not any(mask.any() for _, mask in cut):
                raise Refused("no_trained_token", self._untrained(output, items))
            values[output.key] = [ids for ids, _ in cut] if output.nested else cut[0][0]
            if output.mask_key is not None:
                masks = [mask for _, mask in cut]
                values[output.mask_key] = masks if output.nested else masks[0]
        return Built(values, tokens, truncated)

    def _untrained(self, output: Output, items: Sequence[tuple[Ids, Mask]]) -> str:
        words = (
            "no trained token" if len(self._outputs) == 1 else f"no trained token in {output.key}"
        )
        if any(mask.any() for _, mask in items):
            words += f" within max_seq_len = {self.config.preprocessing.max_seq_len}"
        return words

    def _sequence(self, output: Output, pieces: Sequence[Piece]) -> tuple[Ids, Mask]:
        """One sequence of its sections, with one BOS at most."""
        ids: list[Ids] = []
        masks: list[Mask] = []
        begun = False
        bos, eos = self._frame_ids(output)
        for section, piece in zip(output.sections, pieces, strict=True):
            found, mask = piece.ids, piece.mask
            writes = section.template and len(found) and found[0] == self._tokenizer.bos_id
            if writes:
                mask = mask.copy()
                mask[0] = False
                found, mask = (found[1:], mask[1:]) if begun else (found, mask)
                begun = True
            elif bos is not None and not begun and (section.template or section.add_special_tokens):
                ids.append(np.array([bos], np.uint32))
                masks.append(np.array([section.action == "train" and not section.template]))
                begun = True
            ids.append(found)
            masks.append(mask)
            if section.append_eos and not (section.template and found[-1:].tolist() == [eos]):
                ids.append(np.array([eos], np.uint32))
                masks.append(np.array([section.action != "mask"]))
        return np.concatenate(ids), np.concatenate(masks)

    def _frame_ids(self, output: Output) -> tuple[int | None, int | None]:
        """BOS and EOS. Where they are one token, EOS alone keeps documents apart."""
        bos, eos = self._tokenizer.bos_id, self._tokenizer.eos_id
        ended = any(section.append_eos for section in output.sections)
        return (None if ended and bos == eos else bos), eos

    # ------------------------------------------------------------------ plain text

    def sift(self, texts: pa.LargeStringArray) -> dict[str, npt.NDArray[np.bool_]]:
        """For each rule that filters plain text, which texts it does; each by one rule at most."""
        limits = self.config.preprocessing
        return sifted(texts, limits.min_chars, limits.max_chars, keep_blank=limits.keep_blank)

    def frame(
        self, ids: npt.NDArray[np.uint32], offsets: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64], int]:
        """What `build` does to a plain text's tokens: BOS, EOS and the limit; and tokens cut."""
        assert self.plain_text is not None, "only for recipes of one plain text"
        bos, eos = self._frame_ids(self._outputs[0])
        section = self._outputs[0].sections[0]
        return framed(
            ids,
            offsets,
            bos=bos if section.add_special_tokens else None,
            eos=eos if section.append_eos else None,
            limit=self.config.preprocessing.max_seq_len,
        )

    # ------------------------------------------------------------------ checks at the start

    def _templates(self, now: datetime | None) -> Conversations | None:
        sections = [section for output in self._outputs for section in output.sections]
        templated = [section for section in sections if section.template]
        if not templated:
            return None
        source = self._tokenizer.chat_template
        if source is None:
            raise ConfigError(
                f"The recipe renders {templated[0].field!r} with a chat template, and the "
                f"tokenizer {self._tokenizer.name} has none: use its chat model's tokenizer, or "
                'put a "chat_template" into its tokenizer_config.json.'
            )
        # Only templates need jinja2, whose import takes as long as Arrow's.
        from penstock.prepare.conversation import Conversations  # noqa: PLC0415
        from penstock.text.template import ChatTemplate  # noqa: PLC0415

        template = ChatTemplate(source, self._tokenizer.special_tokens_map, now=now)
        config, ends = self.config, tuple(self._tokenizer.specials)
        found = Conversations(template, config.trains, config.mask, ends)
        if any(section.action == "$role" for section in templated):
            found.check()
        return found

    def _check_ends(self) -> None:
        for output in self._outputs:
            ended = any(section.append_eos for section in output.sections)
            if ended and self._tokenizer.eos_id is None:
                raise ConfigError(
                    f"The recipe ends {output.key!r} with EOS, and the tokenizer "
                    f"{self._tokenizer.name} has none: name an eos_token in its "
                    "tokenizer_config.json, or leave append_eos out."
                )


def _keys(config: PipelineConfig, outputs: Sequence[Output]) -> dict[str, Key]:
    dtypes = config.output.dtype
    keys = {}
    for output in outputs:
        dtype = dtypes.get(output.key)
        if output.value:
            keys[output.key] = Key(dtype=dtype or "float32", role="value")
            continue
        keys[output.key] = Key(dtype=dtype, nested=output.nested, role="ids")
        if (mask := output.mask_key) is not None:
            keys[mask] = Key(
                dtype=dtypes.get(mask), nested=output.nested, group=output.key, role="mask"
            )
    return keys


def _counted(keys: Mapping[str, Key], outputs: Sequence[Output], vocab_size: int) -> dict[str, str]:
    """The values of which there is one for each item of another key; dtypes are checked, too."""
    schema = Schema.of(keys, vocab_size=vocab_size)
    for output in outputs:
        stored = schema.keys[output.key]
        if not output.value and np.iinfo(stored.dtype).max < vocab_size - 1:
            raise ConfigError(
                f"output.dtype.{output.key} is {stored.dtype}, too small for a vocabulary of "
                f"{vocab_size:,}: leave it out, and it follows from the vocabulary."
            )
    leads = {o.key: schema.keys[o.key].offsets[0] for o in outputs if o.value}
    return {key: lead for key, lead in leads.items() if lead != key}


def _field(record: Record, name: str) -> Any:
    value = record.get(name)
    if value is None:
        found = "null" if name in record else "missing"
        raise Refused("missing_field", f"{name} is {found}")
    return value


def _valid(text: str, where: str) -> str:
    """The text, if it is one: half a surrogate pair is no character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Refused(
            "bad_value", f"{where} holds a lone surrogate at character {error.start}"
        ) from None
    return text


def _kind(value: Any) -> str:
    """What a value is, in JSON's words.

    >>> _kind({}), _kind("4"), _kind(None)
    ('an object', 'text', 'null')
    """
    match value:
        case None:
            return "null"
        case bool():
            return "true or false"
        case int() | float():
            return "a number"
        case str():
            return "text"
        case list() | tuple():
            return "a list"
        case Mapping():
            return "an object"
    return f"a {type(value).__name__}"
