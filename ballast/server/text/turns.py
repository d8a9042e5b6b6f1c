"""Rewrite a conversation in the forms that a chat template takes, so that nothing of it is refused
or left out (docs/decisions/066-conversations-fit-the-template.md).

The rules, each applied only where the template does not take the form as it is:

1. `developer` is `system`.
2. Calls are text of the assistant in the model's syntax; a result is a user's turn. Several calls
   of a turn become turns of one call each, with its result. Text beside a call comes before it.
3. The system messages at the beginning are one. Without a place for one, it begins the first user's
   turn; so it does where nothing else was said. An empty user's turn comes before an assistant's.
4. A later system message is a user's turn, marked `<system>`. Results follow their calls first.
5. Turns of one role in a row are one. A user's turn after results is part of the last of them; one
   after a call without a result is that result.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ballast.server.text.template_traits import TemplateTraits
from ballast.server.tools.dialect import RESULT, ToolDialect

Message = dict[str, Any]
_SYSTEM = ("system", "developer")
_LATE = "<system>\n{}\n</system>"


def fitted(
    messages: Sequence[Message],
    traits: TemplateTraits,
    dialect: ToolDialect | None,
    preface: str = "",
) -> list[Message]:
    """Rewrite `messages` for a template with `traits`. `preface`: added to the system message."""
    turns = [_with_role(message, traits) for message in messages]
    turns = list(_with_calls(turns, traits, dialect))
    leading = next((i for i, t in enumerate(turns) if t["role"] not in _SYSTEM), len(turns))
    rest = turns[leading:] if traits.late_system else list(_without_late(turns[leading:]))
    turns = _begun(turns[:leading], rest, traits, preface)
    if not traits.results:
        turns = [_user(RESULT.format(t["content"])) if t["role"] == "tool" else t for t in turns]
    return turns if traits.repeated_roles and traits.user_after_result else _merged(turns, traits)


def _with_role(message: Message, traits: TemplateTraits) -> Message:
    if message["role"] == "developer" and not traits.developer:
        return {**message, "role": "system"}
    return message


def _joined(*texts: str) -> str:
    return "\n\n".join(text for text in texts if text)


# -- calls and results --------------------------------------------------------------------------


def _with_calls(
    turns: Sequence[Message], traits: TemplateTraits, dialect: ToolDialect | None
) -> Iterator[Message]:
    at = 0
    while at < len(turns):
        turn = turns[at]
        at += 1
        calls = turn.get("tool_calls")
        if not isinstance(calls, list) or not calls:
            yield turn
        elif not traits.calls:
            text = "" if dialect is None else dialect.written(calls)
            left = {k: v for k, v in turn.items() if k != "tool_calls"}
            yield {**left, "content": "\n".join(filter(None, (turn["content"], text)))}
        else:
            if turn["content"] and not traits.text_beside_call and traits.text_before_call:
                yield {"role": turn["role"], "content": turn["content"]}
                turn = {**turn, "content": ""}
            if len(calls) == 1 or traits.several_calls:
                yield turn
                continue
            end = at
            while end < len(turns) and turns[end]["role"] == "tool":
                end += 1
            yield from _one_by_one(turn, calls, turns[at:end])
            at = end


def _one_by_one(
    turn: Message, calls: Sequence[Any], results: Sequence[Message]
) -> Iterator[Message]:
    """Yield a turn for each call, and after each its results; those of no call come last."""
    by_call: dict[str, list[Message]] = {}
    for each in results:
        by_call.setdefault(str(each.get("tool_call_id")), []).append(each)
    for i, call in enumerate(calls):
        yield {**turn, "tool_calls": [call], "content": "" if i else turn["content"]}
        call_id = call.get("id") if isinstance(call, dict) else None
        yield from by_call.pop(str(call_id), ())
    for left in by_call.values():
        yield from left


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


# -- system messages ----------------------------------------------------------------------------


def _begun(
    leading: list[Message], rest: list[Message], traits: TemplateTraits, preface: str
) -> list[Message]:
    """Put system messages before the other turns: one, or as many as there are."""
    if preface:
        last = leading.pop() if leading else {"role": "system", "content": ""}
        leading.append({**last, "content": _joined(last["content"], preface)})
    if len(leading) > 1 and not traits.several_systems:
        text = _joined(*(turn["content"] for turn in leading))
        leading = [{**leading[0], "content": text}]
    if rest and rest[0]["role"] == "assistant" and not traits.answer_first:
        rest = [_user(""), *rest]
    if not leading or (traits.system and (rest or traits.system_alone)):
        return leading + rest
    text = _joined(*(turn["content"] for turn in leading))
    if rest and rest[0]["role"] == "user":
        return [{**rest[0], "content": _joined(text, rest[0]["content"])}, *rest[1:]]
    return [_user(text), *rest]


def _without_late(turns: Iterable[Message]) -> Iterator[Message]:
    """Turn system messages into users' turns; those between a call and its results come after
    these."""
    held: list[str] = []
    for turn in turns:
        if turn["role"] in _SYSTEM:
            held.append(_LATE.format(turn["content"]))
            continue
        if held and turn["role"] != "tool":
            yield _user(_joined(*held))
            held = []
        yield turn
    if held:
        yield _user(_joined(*held))


# -- turns in a row -----------------------------------------------------------------------------


def _merged(turns: Sequence[Message], traits: TemplateTraits) -> list[Message]:
    """Merge turns of one role, and a user's turn with the result before it."""
    made: list[Message] = []
    texts: list[list[str]] = []
    """The texts of each turn, which are joined once: there may be thousands."""
    joins = traits.results and not traits.user_after_result
    for i, turn in enumerate(turns):
        empty = not turn["content"] and not turn.get("tool_calls") and turn["role"] == "assistant"
        if empty and not traits.repeated_roles and i < len(turns) - 1:
            continue
        if made and turn["role"] == "user" and made[-1].get("tool_calls") and joins:
            made.append(_unanswered(made[-1]))
            texts.append([])
        if made and _belongs(turn, made[-1], traits):
            if made[-1]["role"] != "tool":
                made[-1] = {**made[-1], **turn}
            texts[-1].append(turn["content"])
        else:
            made.append(turn)
            texts.append([turn["content"]])
    return [{**turn, "content": _joined(*own)} for turn, own in zip(made, texts, strict=True)]


def _unanswered(turn: Message) -> Message:
    """Build the result of a call that got none, to take the user's turn that follows."""
    call = turn["tool_calls"][-1]
    call_id = call.get("id") if isinstance(call, dict) else None
    return {"role": "tool", "content": "", "tool_call_id": call_id}


def _belongs(turn: Message, before: Message, traits: TemplateTraits) -> bool:
    """Whether a turn is to be part of the one before it."""
    role = turn["role"]
    if role == "user" and before["role"] == "tool":
        return not traits.user_after_result
    if traits.repeated_roles or role != before["role"] or role not in ("user", "assistant"):
        return False
    if before.get("tool_calls"):
        return False
    return not turn.get("tool_calls") or traits.text_beside_call
