"""Grammars: a function of the output alone, kept or made anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher

from ballast.core.errors import InvalidRequest
from ballast.fleet.tokenizer import train_tokenizer
from ballast.models.grammar import Grammars

VOCAB, EOS = 320, (0, 3)
NUMBERS: str = LLMatcher.grammar_from_regex("[1-3]+(, [1-3]+)?;")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("tokenizer")
    made = train_tokenizer(["1, 2; 3, 12; 23, 1"] * 9, 280, 100)
    made.save_pretrained(path)
    return path, made


def grammars(tokenizer: Any, keep: int = 4) -> Grammars:
    return Grammars(tokenizer[0], VOCAB, EOS, keep)


def test_only_what_the_grammar_allows_and_then_the_end(tokenizer: Any) -> None:
    g, (_, texts) = grammars(tokenizer), tokenizer
    output: list[int] = []
    for token in texts.encode("12, 3;"):
        allowed = g.allowed("r", NUMBERS, output)
        assert allowed.shape == (VOCAB,)
        assert allowed[token]
        assert not allowed[texts.encode("x")[0]]
        assert not allowed[list(EOS)].any()
        assert not allowed[len(texts) :].any()
        output.append(token)
        assert g.ends("r", token) == (len(output) == len(texts.encode("12, 3;")))
    assert np.flatnonzero(g.allowed("again", NUMBERS, output)).tolist() == list(EOS)


def test_it_makes_no_difference_whether_a_matcher_was_kept(tokenizer: Any) -> None:
    g, (_, texts) = grammars(tokenizer, keep=1), tokenizer
    tokens = texts.encode("12, 31")
    for n in range(len(tokens)):
        kept = g.allowed("r", NUMBERS, tokens[:n])
        anew = grammars(tokenizer).allowed("r", NUMBERS, tokens[:n])
        assert (kept == anew).all()
        g.ends("r", tokens[n])
        if n == 2:
            g.allowed("another", NUMBERS, [])  # drives the first out
    back = g.allowed("r", NUMBERS, tokens[:1])  # another request by the same name
    assert (back == grammars(tokenizer).allowed("r", NUMBERS, tokens[:1])).all()


@pytest.mark.parametrize("grammar", ["nonsense {", '{"grammars": 5}'])
def test_a_grammar_at_fault_is_refused(tokenizer: Any, grammar: str) -> None:
    g = grammars(tokenizer)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="the grammar cannot be followed"):
            g.allowed("r", grammar, [])
    assert g.allowed("r", NUMBERS, []).any()


def test_an_output_that_does_not_follow_is_refused(tokenizer: Any) -> None:
    with pytest.raises(InvalidRequest, match="the grammar cannot be followed"):
        grammars(tokenizer).allowed("r", NUMBERS, tokenizer[1].encode("x"))


def test_a_model_without_a_tokenizer_has_no_grammars(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no grammars for this model's tokenizer"):
        Grammars(tmp_path, VOCAB, EOS, 1).allowed("r", NUMBERS, [])
