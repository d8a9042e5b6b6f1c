"""Find out which forms of conversation a chat template renders, by trying them.

Agents send what few templates take: several system messages, some of them late, two users' turns in
a row, several calls at once, text beside them. Templates refuse some of it, and leave out some of
it without a word. `probed` renders a sample of each form; `turns` rewrites those that a template
does not take.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Turn = Mapping[str, Any]
Render = Callable[[Sequence[Turn]], Awaitable[str | None]]
"""Renders a conversation; None where the template refuses it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateTraits:
    """Forms of conversation that a template renders without loss."""

    developer: bool = True
    """The role `developer`, which is otherwise `system`."""
    system: bool = True
    """A system message at the beginning."""
    system_alone: bool = True
    """A system message, and nothing else."""
    answer_first: bool = True
    """A conversation that the assistant begins."""
    several_systems: bool = True
    """Several of them at the beginning."""
    late_system: bool = True
    """System messages between other turns, and at the end."""
    repeated_roles: bool = True
    """Two turns of one role in a row."""
    calls: bool = True
    """Earlier calls."""
    results: bool = True
    """Results of calls, in turns of the role `tool`."""
    several_calls: bool = True
    """Several calls in one turn."""
    text_beside_call: bool = True
    """Text in the turn of a call."""
    text_before_call: bool = True
    """Text in a turn of its own before that of a call."""
    user_after_result: bool = True
    """A user's turn after a result."""


def _turn(role: str, word: str) -> Turn:
    return {"role": role, "content": word}


def _call(*words: str, text: str = "") -> Turn:
    calls = [
        {
            "id": f"ballast0{i}",  # nine letters and digits, as Mistral's templates need
            "type": "function",
            "function": {"name": "lookup", "arguments": f'{{"key": "{word}"}}'},
        }
        for i, word in enumerate(words)
    ]
    return {"role": "assistant", "content": text, "tool_calls": calls}


def _result(word: str, i: int = 0) -> Turn:
    return {"role": "tool", "content": word, "tool_call_id": f"ballast0{i}", "name": "lookup"}


_A, _B, _C, _D, _E = "quokkaone", "quokkatwo", "quokkathree", "quokkafour", "quokkafive"
"""Words that no template has."""
_USER = _turn("user", _A)


async def probed(render: Render, template: str, *, calls: bool) -> TemplateTraits:
    """Try which forms `template` renders. `calls`: whether earlier calls may be given to it at all.

    A template that does not render a single user's turn gets everything as it is.
    """

    async def shows(*turns: Turn, **words: str) -> bool:
        """Whether all the words of a conversation are rendered, in their order."""
        text = await render(turns)
        return text is not None and _ordered(text, _words(turns))

    async def takes(*turns: Turn, at: int) -> bool:
        """Whether a conversation is rendered, and the turn `at` otherwise than a user's."""
        if not await shows(*turns):
            return False
        as_user = [{**t, "role": "user"} if i == at else t for i, t in enumerate(turns)]
        return await render(as_user) != await render(turns)

    if not await shows(_USER):
        return TemplateTraits()
    user, answer = _turn("user", _C), _turn("assistant", _C)
    developer = "developer" in template and await takes(_turn("developer", _A), user, at=0)
    second = _turn("developer" if developer else "system", _B)
    late = (_USER, _turn("system", _B), answer, _turn("user", _D), _turn("system", _E))
    native = calls and await shows(_USER, _call(_B), _result(_C))
    asked = (_USER, _call(_B) if native else _turn("assistant", _B))
    results = await takes(*asked, _result(_C), at=2)
    return TemplateTraits(
        developer=developer,
        system=await takes(_turn("system", _A), user, at=0),
        system_alone=await shows(_turn("system", _A)),
        answer_first=await shows(_turn("assistant", _A), _turn("user", _B), answer),
        several_systems=await takes(_turn("system", _A), second, user, at=1),
        late_system=await takes(*late, at=1),
        repeated_roles=await shows(_USER, _turn("user", _B), answer, _turn("assistant", _D)),
        calls=native,
        results=results,
        several_calls=await shows(_USER, _call(_B, _C), _result(_D), _result(_E, 1)),
        text_beside_call=await shows(_USER, _call(_C, text=_B), _result(_D)),
        text_before_call=await shows(
            _USER, _turn("assistant", _B), _call(_C), _result(_D), _turn("assistant", _E)
        ),
        user_after_result=results and await shows(*asked, _result(_C), _turn("user", _D)),
    )


def _words(turns: Sequence[Turn]) -> list[str]:
    found = []
    for turn in turns:
        found.append(turn["content"])
        for call in turn.get("tool_calls", ()):
            found.append(call["function"]["arguments"].split('"')[3])
    return [word for word in found if word]


def _ordered(text: str, words: Sequence[str]) -> bool:
    at = 0
    for word in words:
        at = text.find(word, at) + 1
        if not at:
            return False
    return True
