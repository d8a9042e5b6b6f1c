"""Conversations are rewritten where a template does not take them, and only there."""

from __future__ import annotations

from dataclasses import fields
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballast.server.text.template_traits import TemplateTraits
from ballast.server.text.turns import fitted
from ballast.server.tools.dialect import ToolDialect

ALL = TemplateTraits()
HERMES = ToolDialect.of("", "hermes", lambda text: None)


def turn(role: str, content: str = "", *calls: str, **more: Any) -> dict[str, Any]:
    made = {"role": role, "content": content, **more}
    if calls:
        made["tool_calls"] = [
            {"id": c, "type": "function", "function": {"name": c, "arguments": "{}"}} for c in calls
        ]
    return made


def result(call: str, content: str) -> dict[str, Any]:
    return turn("tool", content, tool_call_id=call)


def lacking(*names: str) -> TemplateTraits:
    return TemplateTraits(**dict.fromkeys(names, False))


S, D, U, A, T = (turn(r, r[0]) for r in ("system", "developer", "user", "assistant", "tool"))
LATE = "<system>\ns\n</system>"


@pytest.mark.parametrize(
    ("lacks", "given", "expected"),
    [
        (["developer"], [D, U], [turn("system", "d"), U]),
        (["developer", "several_systems"], [S, D, U], [turn("system", "s\n\nd"), U]),
        (["several_systems"], [S, S, S, U], [turn("system", "s\n\ns\n\ns"), U]),
        (["several_systems"], [S, U, S], [S, U, S]),
        (["system"], [S, U], [turn("user", "s\n\nu")]),
        (["system", "several_systems"], [S, S], [turn("user", "s\n\ns")]),
        (["system"], [S, A], [turn("user", "s"), A]),
        (["system_alone"], [S], [turn("user", "s")]),
        (["system_alone"], [S, U], [S, U]),
        (["answer_first"], [S, A, U], [S, turn("user"), A, U]),
        (["answer_first", "system"], [S, A, U], [turn("user", "s"), A, U]),
        (["answer_first"], [U, A], [U, A]),
        (["late_system"], [S, U, S, A, U, S], [S, U, turn("user", LATE), A, U, turn("user", LATE)]),
        (["late_system", "repeated_roles"], [U, S, A], [turn("user", f"u\n\n{LATE}"), A]),
        (
            ["late_system"],
            [U, turn("assistant", "", "f"), S, result("f", "r"), A],
            [U, turn("assistant", "", "f"), result("f", "r"), turn("user", LATE), A],
        ),
        (
            ["repeated_roles"],
            [U, U, A, A, U],
            [turn("user", "u\n\nu"), turn("assistant", "a\n\na"), U],
        ),
        (["repeated_roles"], [U, turn("assistant"), U], [turn("user", "u\n\nu")]),
        (["repeated_roles"], [U, turn("assistant")], [U, turn("assistant")]),
        (
            ["repeated_roles"],
            [U, A, turn("assistant", "b", "f"), result("f", "r")],
            [U, turn("assistant", "a\n\nb", "f"), result("f", "r")],
        ),
        (["user_after_result"], [U, T, U, U], [U, turn("tool", "t\n\nu\n\nu")]),
        (
            ["user_after_result"],
            [U, turn("assistant", "", "f"), U],
            [U, turn("assistant", "", "f"), result("f", "u")],
        ),
        (
            ["calls"],
            [U, turn("assistant", "a", "f"), result("f", "r")],
            [
                U,
                turn("assistant", 'a\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'),
                result("f", "r"),
            ],
        ),
        (["results"], [U, A, T], [U, A, turn("user", "<tool_response>\nt\n</tool_response>")]),
        (
            ["several_calls"],
            [U, turn("assistant", "a", "f", "g"), result("g", "2"), result("f", "1"), U],
            [
                U,
                turn("assistant", "a", "f"),
                result("f", "1"),
                turn("assistant", "", "g"),
                result("g", "2"),
                U,
            ],
        ),
        (
            ["several_calls"],
            [turn("assistant", "", "f", "g"), result("x", "1")],
            [turn("assistant", "", "f"), turn("assistant", "", "g"), result("x", "1")],
        ),
        (
            ["text_beside_call"],
            [U, turn("assistant", "a", "f"), T],
            [U, A, turn("assistant", "", "f"), T],
        ),
        (
            ["text_beside_call", "text_before_call"],
            [U, turn("assistant", "a", "f"), T],
            [U, turn("assistant", "a", "f"), T],
        ),
    ],
)
def test_only_what_a_template_does_not_take_is_rewritten(
    lacks: list[str], given: list[dict[str, Any]], expected: list[dict[str, Any]]
) -> None:
    assert fitted(given, lacking(*lacks), HERMES) == expected
    assert fitted(given, ALL, HERMES) == given


@pytest.mark.parametrize(
    ("traits", "given", "expected"),
    [
        (ALL, [U], [turn("system", "f"), U]),
        (ALL, [S, S, U], [S, turn("system", "s\n\nf"), U]),
        (lacking("several_systems"), [S, S, U], [turn("system", "s\n\ns\n\nf"), U]),
        (lacking("system"), [U], [turn("user", "f\n\nu")]),
    ],
)
def test_functions_are_described_in_the_system_message(
    traits: TemplateTraits, given: list[dict[str, Any]], expected: list[dict[str, Any]]
) -> None:
    assert fitted(given, traits, HERMES, "f") == expected


def test_long_conversations_are_rewritten_in_time_that_grows_with_them() -> None:
    """A hostile one would hold the interpreter for seconds: by work, not by the clock."""
    traits = lacking("repeated_roles", "several_calls", "user_after_result")
    calls = [f"c{i}" for i in range(4000)]
    results = [result(call, "r" * 100) for call in reversed(calls)]
    made = fitted([U, turn("assistant", "", *calls), *results, *[U] * 4000], traits, HERMES)
    assert [t["role"] for t in made] == ["user", *["assistant", "tool"] * 4000]
    assert len(made[-1]["content"]) == 100 + 4000 * len("\n\nu")


ROLES = st.sampled_from(["system", "developer", "user", "assistant", "tool"])


@given(
    st.lists(st.tuples(ROLES, st.integers(0, 2)), max_size=9),
    st.sets(st.sampled_from([f.name for f in fields(TemplateTraits)])),
)
def test_nothing_is_lost_whatever_a_template_lacks(
    kinds: list[tuple[str, int]], lacks: set[str]
) -> None:
    """Only late system messages and calls move, and only to their results."""
    turns = [
        turn(role, f"text{i}.", *(f"call{i}.{c}." for c in range(n if role == "assistant" else 0)))
        for i, (role, n) in enumerate(kinds)
    ]
    made = fitted(turns, lacking(*lacks), HERMES)
    whole = str(made)
    for i, each in enumerate(turns):
        assert whole.count(f"text{i}.") == 1
        for call in each.get("tool_calls", ()):
            assert call["id"] in whole
    roles = [t["role"] for t in made]
    if "developer" in lacks:
        assert "developer" not in roles
    if {"system", "late_system"} <= lacks:
        assert not {"system"} & set(roles) or "developer" not in lacks
    if "calls" in lacks:
        assert not any(t.get("tool_calls") for t in made)
    if "results" in lacks:
        assert "tool" not in roles
    if "repeated_roles" in lacks:
        assert ("user", "user") not in set(pairwise(roles))
