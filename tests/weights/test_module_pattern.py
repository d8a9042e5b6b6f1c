"""Patterns of adapters mean what PEFT takes them for, and none of them takes for ever."""

from __future__ import annotations

import re

import pytest

from ballast.weights.module_pattern import MOST_CHARACTERS, ModulePattern

PATHS = [
    f"model.layers.{i}.{block}.{name}"
    for i in (0, 1, 11)
    for block in ("self_attn", "mlp")
    for name in ("q_proj", "xq_proj", "gate_proj", "q", "é")
] + ["lm_head", "q_proj"]
PATTERNS = [
    "q_proj",
    "self_attn.q_proj",
    r"self_attn\.q_proj",
    "model.layers.0.self_attn.q_proj",
    "^model.layers.0.self_attn.q_proj",
    "^model.layers.0.self_attn.q_proj$",
    "^q_proj",
    "q_proj$",
    r"layers\.\d+\..*\.(q|gate)_proj",
    "layers.(1|11).mlp.*",
    "[gq].*_?proj",
    "q_proj|lm_head",
    "x?q_pro{1,2}j",
    ".*",
    "é",
    "layers",
]
"""Of what PEFT's users write."""
ENDLESS = ["(a{999}){999}b|a*b", "(a+)+b", "(a|a)*b", "(.*a){30}b", "a?" * 30 + "a" * 30 + "b"]


@pytest.mark.parametrize("text", PATTERNS)
def test_as_peft_matches_them(text: str) -> None:
    pattern = ModulePattern(text)
    for path in PATHS:
        expected = re.match(rf"(.*\.)?({text})$", path) is not None
        assert pattern.matches(path) == expected, path


@pytest.mark.parametrize("text", ENDLESS)
def test_none_takes_for_ever(text: str) -> None:
    assert not ModulePattern(text).matches("a" * 200)
    assert ModulePattern(text).matches("a" * 40 + "b")


@pytest.mark.parametrize("text", ["(", "(?=a)", r"(a)\1", "[", r"\bq"])
def test_what_cannot_be_matched_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        ModulePattern(text)


def test_a_long_one_is_refused() -> None:
    ModulePattern("a" * MOST_CHARACTERS)
    with pytest.raises(ValueError, match="longer"):
        ModulePattern("a" * (MOST_CHARACTERS + 1))
