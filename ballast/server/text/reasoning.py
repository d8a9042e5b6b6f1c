"""Divide streamed output text into reasoning and answer, by the tags between which a model reasons.

A model's tags are those that its checkpoint declares (`response_template` of `transformers`; its
literal texts alone, since patterns of a checkpoint could be made to take for ever), or known ones
that its chat template writes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ballast.server.tools.delta import Content, Delta, Thought

_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Names under which checkpoints declare their reasoning."""
_LONGEST = 64
"""Most characters of a declared tag."""
_BLANKS = 256
"""Most blanks that are held back, as those before a closing tag are no part of the reasoning."""
_TOKEN = re.compile(r"<\|\w+\|>|</?[\w:]+>|\[/?\w+\]")


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """Texts around the reasoning of one model, which comes before its answer."""

    opens: tuple[str, ...]
    closes: tuple[str, ...]
    skips: tuple[str, ...] = ()
    """Texts that begin an answer without reasoning, and are no part of it."""

    @classmethod
    def of(cls, template: str, declared: object = None) -> ReasoningTags | None:
        """Select the tags of a model by its chat template; `declared`: its response template. None:
        it writes no reasoning, or in a form that is not known."""
        return _declared(declared) or next((t for t in KNOWN if t._is_in(template)), None)

    def _is_in(self, template: str) -> bool:
        return any(text in template for text in (*self.closes, *self.skips))

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that the tokenizer may have as single tokens."""
        texts = (*self.opens, *self.closes, *self.skips)
        return tuple(dict.fromkeys(m for text in texts for m in _TOKEN.findall(text)))

    def parser(self, prompt_end: str) -> ReasoningParser:
        """Create the parser of one output. `prompt_end`: the last of its prompt, which may have
        opened the reasoning."""
        return ReasoningParser(self, within=prompt_end.rstrip().endswith(self.opens))


KNOWN = (
    # DeepSeek R1, Qwen 3, QwQ, SmolLM 3, GLM 4.5, Hunyuan and others.
    ReasoningTags(("<think>",), ("</think>",)),
    # Magistral.
    ReasoningTags(("[THINK]",), ("[/THINK]",)),
    # Command A Reasoning.
    ReasoningTags(("<|START_THINKING|>",), ("<|END_THINKING|>",)),
    # Seed OSS.
    ReasoningTags(("<seed:think>",), ("</seed:think>",)),
    # GPT-OSS.
    ReasoningTags(
        ("<|channel|>analysis<|message|>",),
        ("<|end|><|start|>assistant<|channel|>final<|message|>",),
        ("<|channel|>final<|message|>",),
    ),
)


def _declared(response: object) -> ReasoningTags | None:
    """Find literal tags in a response template; None without."""
    declared = response.get("fields") if isinstance(response, Mapping) else None
    fields: Mapping[str, Any] = declared if isinstance(declared, Mapping) else {}
    for name in _FIELDS:
        field = fields.get(name)
        if isinstance(field, Mapping):
            opens, closes = _literals(field.get("open")), _literals(field.get("close"))
            if opens and closes:
                return ReasoningTags(opens, closes)
    return None


def _literals(value: Any) -> tuple[str, ...]:
    """The texts of an anchor, without blanks around them; none where one of them is no tag."""
    texts = [value] if isinstance(value, str) else value if isinstance(value, list) else []
    found = tuple(text.strip() if isinstance(text, str) else "" for text in texts)
    return found if all(0 < len(text) <= _LONGEST for text in found) else ()


class ReasoningParser:
    """Parses one output. Call `push` with its text and `flush` at its end.

    Blanks around the reasoning, and before the answer after it, are left out. An output that does
    not begin with reasoning is all answer.
    """

    def __init__(self, tags: ReasoningTags, *, within: bool = False) -> None:
        """`within`: whether the output begins within the reasoning."""
        self._tags = tags
        self._part: Literal["start", "within", "between", "answer"]
        self._part = "within" if within else "start"
        self._held = ""
        self._begun = False
        """Whether the reasoning has any text."""

    @property
    def within(self) -> bool:
        """Whether the text now is reasoning."""
        return self._part == "within"

    def push(self, text: str) -> list[Delta]:
        """Return what more text adds. Text that may yet become a tag is held back."""
        self._held += text
        return list(self._read(last=False))

    def flush(self) -> list[Delta]:
        """Return the text held back, at the end of the output."""
        return list(self._read(last=True))

    def _read(self, *, last: bool) -> Iterable[Delta]:
        if self._part == "start":
            yield from self._start(last)
        if self._part == "within":
            yield from self._within(last)
        if self._part == "between":
            self._held = self._held.lstrip()
            if self._held:
                self._part = "answer"
        if self._part == "answer" and self._held:
            held, self._held = self._held, ""
            yield Content(held)

    def _start(self, last: bool) -> Iterable[Delta]:
        tags, text = self._tags, self._held.lstrip()
        for tag in (*tags.opens, *tags.skips):
            if text.startswith(tag):
                self._held = text[len(tag) :]
                self._part = "within" if tag in tags.opens else "answer"
                return
        if last or not any(tag.startswith(text) for tag in (*tags.opens, *tags.skips)):
            self._part = "answer"
        yield from ()

    def _within(self, last: bool) -> Iterable[Delta]:
        if not self._begun:
            self._held = self._held.lstrip()
        found = [(at, tag) for tag in self._tags.closes if (at := self._held.find(tag)) >= 0]
        if found:
            at, tag = min(found)
            text, self._held = self._held[:at].rstrip(), self._held[at + len(tag) :]
            self._part = "between"
        elif last:
            text, self._held = self._held.rstrip(), ""
        else:
            whole = len(self._held) - _partial(self._held, self._tags.closes)
            kept = len(self._held[:whole].rstrip())
            if whole - kept > _BLANKS:
                kept = whole
            text, self._held = self._held[:kept], self._held[kept:]
        if text:
            self._begun = True
            yield Thought(text)


def _partial(text: str, tags: Collection[str]) -> int:
    """Length of the longest end of `text` that begins one of `tags`."""
    longest = min(len(text), max(map(len, tags)) - 1)
    return next(
        (n for n in range(longest, 0, -1) if any(tag.startswith(text[-n:]) for tag in tags)), 0
    )
