"""Grammars: a function of the output alone, whether a matcher was kept or is made anew."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher

from ballast.core.errors import BrokenPromise, InvalidRequest
from ballast.fleet.tokenizer import train_tokenizer
from ballast.models import grammar
from ballast.models.grammar import (
    CompiledGrammar,
    Grammars,
    GrammarTokenizer,
    compile_grammar,
)

VOCAB, EOS = 320, (0, 3)
NUMBERS: str = LLMatcher.grammar_from_regex("[1-3]+(, [1-3]+)?;")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("tokenizer")
    made = train_tokenizer(["1, 2; 3, 12; 23, 1"] * 9, 280, 100)
    made.save_pretrained(path)
    return path, made


@pytest.fixture(scope="module")
def loaded(tokenizer: Any) -> Any:
    return GrammarTokenizer(tokenizer[0], VOCAB, EOS).load()


@pytest.fixture
def numbers(loaded: Any) -> CompiledGrammar:
    return compile_grammar(loaded, NUMBERS)


def grammars(tokenizer: Any, compiled: CompiledGrammar, *ids: str) -> Grammars:
    made = Grammars(tokenizer[0], VOCAB, EOS)
    for id in ids:
        made.hold(id, compiled)
    return made


def allowed(grammars: Grammars, id: str, output: list[int]) -> Any:
    return grammars.matcher(id, output).allowed(output)


def test_only_what_the_grammar_allows_and_then_the_end(
    tokenizer: Any, numbers: CompiledGrammar
) -> None:
    g, (_, texts) = grammars(tokenizer, numbers, "r", "again"), tokenizer
    output: list[int] = []
    for token in texts.encode("12, 3;"):
        matcher = g.matcher("r", output)
        mask = matcher.allowed(output)
        assert mask.shape == (VOCAB,)
        assert mask[token]
        assert not mask[texts.encode("x")[0]]
        assert not mask[list(EOS)].any()
        assert not mask[len(texts) :].any()
        output.append(token)
        assert matcher.ends(token) == (len(output) == len(texts.encode("12, 3;")))
    assert np.flatnonzero(allowed(g, "again", output)).tolist() == list(EOS)


def test_it_makes_no_difference_whether_a_matcher_was_kept(
    tokenizer: Any, numbers: CompiledGrammar
) -> None:
    g, (_, texts) = grammars(tokenizer, numbers, "r"), tokenizer
    tokens = texts.encode("12, 31")
    for n in range(len(tokens)):
        kept = g.matcher("r", tokens[:n])
        anew = allowed(grammars(tokenizer, numbers, "r"), "r", tokens[:n])
        assert (kept.allowed(tokens[:n]) == anew).all()
        kept.ends(tokens[n])
        if n == 2:
            kept.ends(tokens[0])  # as in a job that failed after this: the output has no such token
    back = allowed(g, "r", tokens[:1])  # resumed with less
    assert (back == allowed(grammars(tokenizer, numbers, "r"), "r", tokens[:1])).all()


def test_requests_of_one_grammar_are_apart(tokenizer: Any, numbers: CompiledGrammar) -> None:
    tokens = tokenizer[1].encode("12, 31")
    g = grammars(tokenizer, numbers, "a", "b")
    for n in range(len(tokens)):
        for id, output in (("a", tokens[:n]), ("b", tokens[: n // 2])):
            alone = allowed(grammars(tokenizer, numbers, "r"), "r", output)
            assert (allowed(g, id, output) == alone).all()


def test_a_matcher_is_of_a_request_that_has_its_grammar(
    tokenizer: Any, numbers: CompiledGrammar
) -> None:
    g = grammars(tokenizer, numbers, "r")
    g.matcher("r", [])
    g.release("r")
    g.release("never held")
    with pytest.raises(BrokenPromise, match="r: its grammar has not been compiled"):
        g.matcher("r", [])


@pytest.mark.parametrize("text", ["nonsense {", '{"grammars": 5}'])
def test_a_grammar_at_fault_is_refused(loaded: Any, text: str) -> None:
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="the grammar cannot be followed"):
            compile_grammar(loaded, text)
    assert compile_grammar(loaded, NUMBERS)


def test_an_output_that_does_not_follow_is_refused(
    tokenizer: Any, numbers: CompiledGrammar
) -> None:
    g, wrong = grammars(tokenizer, numbers, "r"), tokenizer[1].encode("x")
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="the grammar cannot be followed"):
            allowed(g, "r", wrong)
    assert numbers.broken
    assert allowed(g, "r", []).any(), "those that use it go on"


def test_a_lexer_that_grows_beyond_its_bound_ends_its_output(
    loaded: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its states are shared by all outputs of the grammar, so the grammar is not used again."""
    monkeypatch.setattr(grammar, "MOST_LEXER_STATES", 1000)
    compiled = compile_grammar(loaded, LLMatcher.grammar_from_regex("([a-z ]*a[a-z ]{24})*"))
    g, rng, output = grammars(tokenizer, compiled, "r"), random.Random(2), list[int]()
    letters = [tokenizer[1].encode(letter)[0] for letter in "ab cad"]

    def go_on(tokens: int) -> None:
        for _ in range(tokens):
            matcher = g.matcher("r", output)
            assert matcher.allowed(output)[letters[0]]
            output.append(rng.choice(letters))
            matcher.ends(output[-1])

    go_on(10)
    assert not compiled.broken
    with pytest.raises(InvalidRequest, match="too many states"):
        go_on(1000)
    assert compiled.broken


def test_a_model_without_a_tokenizer_has_no_grammars(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no grammars for this model's tokenizer"):
        GrammarTokenizer(tmp_path, VOCAB, EOS).load()


def test_equal_tokenizers_have_equal_keys(tokenizer: Any, tmp_path: Path) -> None:
    key = GrammarTokenizer(tokenizer[0], VOCAB, EOS).key
    copy = tmp_path / "copy"
    shutil.copytree(tokenizer[0], copy)
    (copy / "model.safetensors").write_bytes(b"other weights")
    assert GrammarTokenizer(copy, VOCAB, EOS).key == key
    assert GrammarTokenizer(copy, VOCAB + 1, EOS).key != key
    assert GrammarTokenizer(copy, VOCAB, (0,)).key != key
    (copy / "config.json").write_text(json.dumps({"model_type": "other"}))
    assert GrammarTokenizer(copy, VOCAB, EOS).key != key
