r"""Which characters of a rendered conversation are trained.

A template's generation blocks say it, where there are any. Else it follows from growing prefixes:
what the template adds to the first k messages for one more is that message, and what it adds when
asked for a generation prompt is its header, which the model is given and does not learn.

    <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n
                                                        ^^^^^^^^^^^^^^^

Blanks after the token that ends a turn are not trained: nobody reads on to see them. A template
that writes a message differently when more follow has no such prefixes, and is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import ConfigError, DataError
from penstock.prepare.outcome import Refused
from penstock.text.sandbox import Overrun
from penstock.text.template import ChatTemplate, Rendered

Spans = list[tuple[int, int]]
Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Written:
    """A conversation as text, and what of it is trained: spans, or all of it, or nothing."""

    text: str
    trained: bool | Spans


class Conversations:
    """Renders conversations of one recipe with one template.

    `trains` says whether a role is trained, `roles` are those the recipe knows, and `ends` the
    texts that may end a turn.
    """

    def __init__(
        self,
        template: ChatTemplate,
        trains: Callable[[str], bool],
        roles: Iterable[str] = (),
        ends: Sequence[str] = (),
    ) -> None:
        self.template = template
        self._trains = trains
        self._ends = tuple(ends)
        self._simple = _simple(list(roles), trains)
        self._headers: dict[str, str] = {}
        self._blocks: dict[str, bool] = {}
        asked = [self._tried(self._simple[:1], prompt=prompt) for prompt in (False, True)]
        self.prompts = asked[0] != asked[1]

    def check(self) -> None:
        """Refuse a template that two simple turns show to be useless for masks."""
        try:
            rendered = self.template.render(self._simple)
        except DataError as error:
            if isinstance(error.__cause__, Overrun):
                raise ConfigError(f"The chat template cannot be used: {error}") from error
            return  # it may want what two simple turns do not have; its records will tell
        if rendered.generation is not None:
            return
        try:
            self.written(self._simple, None, "$role")
        except Refused as error:
            raise ConfigError(
                f"The chat template gives no masks for two simple turns: {error}. Put "
                "{% generation %} and {% endgeneration %} around what the assistant writes in "
                "it, or use another template."
            ) from error

    def written(
        self,
        messages: Sequence[Message],
        tools: Any,
        action: str,
        *,
        prompt: bool = False,
    ) -> Written:
        """The whole conversation, and what of it an action trains."""
        chat, overrides = _without_overrides(messages)
        rendered = self._rendered(chat, tools, prompt=prompt)
        roles = [str(message.get("role", "")) for message in chat]
        ruled = [action == "train" or (action == "$role" and self._trains(r)) for r in roles]
        acts = [r if o is None else o for r, o in zip(ruled, overrides, strict=True)]
        if not any(acts):
            return Written(rendered.text, trained=False)
        if action == "train" and all(acts):
            return Written(rendered.text, trained=True)
        prefixes = _Prefixes(self, chat, tools, None if prompt else rendered.text, rendered.text)
        spans: Spans = []
        if action == "train":
            at = 0
            for k, act in enumerate(acts):
                if not act:
                    spans.append((at, prefixes.end(k)))
                    at = prefixes.end(k + 1)
            return Written(rendered.text, [*spans, (at, len(rendered.text))])
        if rendered.generation is None:
            spans = [prefixes.span(k, roles[k]) for k, act in enumerate(acts) if act]
        elif acts == [self._has_blocks(role) for role in roles] and not any(
            o is not None for o in overrides
        ):
            spans = rendered.generation
        else:
            spans = self._chosen(prefixes, roles, acts, rendered.generation)
        return Written(rendered.text, [span for span in spans if span[0] < span[1]])

    def _chosen(
        self, prefixes: _Prefixes, roles: list[str], acts: list[bool], blocks: Spans
    ) -> Spans:
        """The generation blocks of the messages to train, and all of a role that has none."""
        spans: Spans = []
        counts = [prefixes.blocks(k) for k in range(len(roles))] + [len(blocks)]
        for k, act in enumerate(acts):
            if counts[k] > counts[k + 1]:
                raise Refused(
                    "template", f"the chat template has fewer generation blocks with message {k}"
                )
            if act and self._has_blocks(roles[k]):
                spans += blocks[counts[k] : counts[k + 1]]
            elif act:
                spans.append(prefixes.span(k, roles[k]))
        return spans

    # ------------------------------------------------------------------ of the template

    def header(self, role: str) -> str:
        """What the template writes before a message of that role, whatever it says."""
        if role not in self._headers:
            self._headers[role] = self._found_header(role)
        return self._headers[role]

    def _found_header(self, role: str) -> str:
        before = self._before(role)
        base = self._tried(before)
        one, other = (self._tried([*before, {"role": role, "content": c}]) for c in ("A", "Z"))
        if base is None or one is None or other is None:
            return ""
        shared = one[: _agreement(one, other)]
        header = shared[len(base) :] if shared.startswith(base) else ""
        return header if header.strip() else ""

    def _before(self, role: str) -> list[Message]:
        """A conversation in which that role may speak next."""
        return self._simple[:2] if role == self._simple[0]["role"] else self._simple[:1]

    def _has_blocks(self, role: str) -> bool:
        """Whether the messages of a role are in generation blocks."""
        if role not in self._blocks:
            before = self._before(role)
            counts = []
            for chat in (before, [*before, {"role": role, "content": "A"}]):
                try:
                    counts.append(len(self.template.render(chat).generation or ()))
                except DataError:
                    counts.append(-1)
            known = -1 not in counts
            self._blocks[role] = counts[1] > counts[0] if known else role == "assistant"
        return self._blocks[role]

    def trims(self, text: str, begin: int, end: int) -> int:
        """Where a turn ends, blanks after its last token left out."""
        found = text[begin:end].rstrip()
        return begin + len(found) if found.endswith(self._ends) else end

    def _tried(self, messages: Sequence[Message], *, prompt: bool = False) -> str | None:
        try:
            return self.template.render(messages, add_generation_prompt=prompt).text
        except DataError:
            return None

    def _rendered(self, chat: Sequence[Message], tools: Any, *, prompt: bool = False) -> Rendered:
        try:
            return self.template.render(chat, tools=tools, add_generation_prompt=prompt)
        except DataError as error:
            raise Refused("template", str(error)) from None


class _Prefixes:
    """The first k messages of one conversation, rendered as they are needed."""

    def __init__(
        self,
        owner: Conversations,
        chat: Sequence[Message],
        tools: Any,
        whole: str | None,
        full: str,
    ) -> None:
        self._owner, self._chat, self._tools = owner, chat, tools
        self._full = full
        self._ends: dict[int, int] = {} if whole is None else {len(chat): len(whole)}

    def end(self, k: int) -> int:
        """Where the first k messages end in the whole text."""
        if k not in self._ends:
            self._ends[k] = self._found_end(k)
        return self._ends[k]

    def _found_end(self, k: int) -> int:
        try:
            text = self._alone(k).text
        except Refused:
            if k == 0:
                return 0  # many templates look at the first message
            raise
        if self._full.startswith(text) or k == 0:
            return len(text) if self._full.startswith(text) else 0
        at = _agreement(text, self._full)
        raise Refused(
            "prefix",
            f"the chat template writes the first {k} messages differently when more follow, from "
            f"character {at} on: {text[at : at + 24]!r} becomes {self._full[at : at + 24]!r}",
        )

    def span(self, k: int, role: str) -> tuple[int, int]:
        """Message k without its header, in the whole text."""
        owner, full = self._owner, self._full
        header, begin = owner.header(role), None
        if owner.prompts:
            try:
                asked = self._alone(k, prompt=True).text
                begin = len(asked) if full.startswith(asked) else None
            except Refused:
                begin = None  # it is asked for after a user's message only
        if begin is None:
            begin = self.end(k)
        if header and not full.endswith(header, 0, begin):
            at = full.find(header, begin, self.end(k + 1)) if k == 0 else begin
            if at >= 0 and full.startswith(header, at):
                begin = at + len(header)
        end = self.end(k + 1)
        return begin, owner.trims(full, begin, end)

    def blocks(self, k: int) -> int:
        """How many generation blocks the first k messages have."""
        if k == 0:
            return 0
        return len(self._alone(k).generation or ())

    def _alone(self, k: int, *, prompt: bool = False) -> Rendered:
        """The first k messages and no more."""
        try:
            return self._owner.template.render(
                self._chat[:k], tools=self._tools, add_generation_prompt=prompt
            )
        except DataError as error:
            raise Refused(
                "template", f"its first {k} messages cannot be rendered alone: {error}"
            ) from None


def _simple(roles: list[str], trains: Callable[[str], bool]) -> list[Message]:
    """Two simple turns of who asks and who is trained, by their names in the recipe.

    >>> [message["role"] for message in _simple(["system", "human", "gpt"], "gpt".__eq__)]
    ['human', 'gpt', 'human', 'gpt']
    """
    others = [role for role in roles if role not in {"system", "user", "assistant"}]
    asker, answerer = "user", "assistant"
    if "assistant" not in roles:
        answerer = next(filter(trains, others), answerer)
    if "user" not in roles:
        # "tool" beside "assistant" asks nothing; who is named beside "gpt" does.
        known = [role for role in others if role != answerer]
        asker = known[0] if known and answerer != "assistant" else asker
    asked = [("One?", "Two."), ("Three?", "Four.")]
    return [
        {"role": role, "content": text}
        for turn in asked
        for role, text in zip((asker, answerer), turn, strict=True)
    ]


def _agreement(one: str, other: str) -> int:
    """How many characters two texts have in common at their start.

    >>> _agreement("assistant: A", "assistant: Z")
    11
    """
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[:middle] == other[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _without_overrides(messages: Sequence[Message]) -> tuple[list[Message], list[bool | None]]:
    """The messages as the template sees them, and what each says of being trained."""
    chat, overrides = [], []
    for i, message in enumerate(messages):
        override = message.get("train")
        if not isinstance(override, bool | None):
            raise Refused(
                "bad_value", f'message {i} has "train": {override!r}, where true or false belongs'
            )
        overrides.append(override)
        chat.append({key: value for key, value in message.items() if key != "train"})
    return chat, overrides
