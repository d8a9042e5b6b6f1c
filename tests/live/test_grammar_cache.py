"""The book of grammars: each is there once, and neither number nor memory exceeds its bounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ballast.core.units import MiB
from ballast.live import grammar_cache
from ballast.live.grammar_cache import LEAST_CHARGE, CachedGrammar, GrammarCache
from ballast.models.grammar import CompiledGrammar, Grammars
from tests.effort import tries

NOWHERE = Path("/nonexistent")
ONE, OTHER = Grammars(NOWHERE, 10, ()), Grammars(NOWHERE, 11, ())
"""Of two tokenizers."""
tenants = st.sampled_from(["", "x", "y"])
texts = st.integers(0, 9).map(lambda n: str(n) * (1 + 40_000 * (n % 3)))
picks = st.integers(0, 1000)


class Prototype:
    def deep_copy(self) -> Any:
        raise AssertionError("nobody asks here")


def made() -> CompiledGrammar:
    return CompiledGrammar(Prototype())


class Book(RuleBasedStateMachine):
    """Few wait and little fits, so that bounds are met."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = patch.multiple(
            grammar_cache,
            MOST_WAITING_EACH=3,
            MOST_WAITING=5,
            MOST_BYTES_EACH=10 * MiB,
            MOST_BYTES=14 * MiB,
        )
        self.patch.start()
        self.book = GrammarCache()
        self.open: dict[str, tuple[CachedGrammar, str, Grammars]] = {}
        """By request: its entry, text and grammars."""
        self.at: CachedGrammar | None = None
        """Being compiled."""
        self.n = 0

    @rule(text=texts, tenant=tenants, grammars=st.sampled_from([ONE, OTHER]))
    def need(self, text: str, tenant: str, grammars: Grammars) -> None:
        self.n += 1
        id = f"r{self.n}"
        waiting = {e.tenant: e for e, _, _ in self.open.values() if e.waits}
        entry = self.book.need(id, text, tenant, grammars)
        if isinstance(entry, str):
            assert waiting, "others wait, or it is not refused"
            self.book.ended(id)  # as the engine does for a request that was refused
            return
        assert entry.key == (grammars.tokenizer.key, text)
        shared = {id_(e) for e, t, g in self.open.values() if (t, g) == (text, grammars)}
        if shared and id_(entry) not in shared:
            assert all(
                e.compiled is not None and e.compiled.broken
                for e, t, g in self.open.values()
                if (t, g) == (text, grammars)
            )
        if entry.compiled is not None:
            assert not entry.compiled.broken
        self.open[id] = entry, text, grammars

    @precondition(lambda self: self.open)
    @rule(pick=picks)
    def end(self, pick: int) -> None:
        id = [*self.open][pick % len(self.open)]
        del self.open[id]
        self.book.ended(id)

    @precondition(lambda self: self.at is None)
    @rule()
    def begin(self) -> None:
        self.at = self.book.next()
        if self.at is None:
            waiting = [e for e, _, _ in self.open.values() if e.waits]
            used = {id_(e): e for e, _, _ in self.open.values() if not e.waits}.values()
            everybody = sum(e.charge for e in used)
            for tenant in {e.tenant for e in waiting}:
                own = sum(e.charge for e in used if e.tenant == tenant)
                most = max(e.charge for e in waiting if e.tenant == tenant)
                assert own + most > 10 * MiB or everybody + most > 14 * MiB, "it would fit"
        else:
            assert self.at.users

    @precondition(lambda self: self.at is not None)
    @rule(sound=st.booleans())
    def compiled(self, sound: bool) -> None:
        assert self.at is not None
        self.book.compiled(self.at, made() if sound else None)
        if not sound:  # the requests fail, in time
            for id in [*self.at.users]:
                del self.open[id]
                self.book.ended(id)
        self.at = None

    @precondition(lambda self: any(e.compiled for e, _, _ in self.open.values()))
    @rule(pick=picks)
    def break_one(self, pick: int) -> None:
        found = [e.compiled for e, _, _ in self.open.values() if e.compiled is not None]
        found[pick % len(found)].broken = True

    @invariant()
    def books_are_right(self) -> None:
        self.book.validate()

    def teardown(self) -> None:
        while self.open:
            self.end(0)
        if self.at is not None:
            self.compiled(True)
        self.book.validate()
        assert self.book.next() is None
        assert not +self.book._charged_to
        self.patch.stop()


def id_(entry: CachedGrammar) -> int:
    return id(entry)


TestBook = Book.TestCase
TestBook.settings = settings(max_examples=tries(20, all=50), stateful_step_count=40, deadline=None)


def test_a_key_cannot_keep_the_queue_from_others() -> None:
    book = GrammarCache()
    for i in range(grammar_cache.MOST_WAITING_EACH):
        assert isinstance(book.need(f"x{i}", f"x {i}", "x", ONE), CachedGrammar)
    refused = book.need("one more", "one more", "x", ONE)
    assert refused == "grammars to be compiled: 64 of the same API key wait already"
    assert isinstance(book.need("again", "x 5", "x", ONE), CachedGrammar), "it waits already"
    assert isinstance(book.need("y", "y", "y", ONE), CachedGrammar)
    order = [book.next() for _ in range(3)]
    assert [entry.text for entry in order if entry is not None] == ["x 0", "y", "x 1"]


def test_what_nobody_needs_stays_while_there_is_room() -> None:
    book = GrammarCache()
    fit = grammar_cache.MOST_BYTES // LEAST_CHARGE
    for i in range(fit + 10):
        book.need(f"r{i}", f"{i}", "", ONE)
        entry = book.next()
        assert entry is not None
        book.compiled(entry, made())
        book.ended(f"r{i}")
    kept = [i for i in range(fit + 10) if (f"{ONE.tokenizer.key}", f"{i}") in book._known]
    assert kept == [*range(10, fit + 10)]
    book.validate()


@pytest.mark.parametrize("compiled", [True, False])
def test_one_that_all_have_left_meanwhile_is_kept_or_forgotten(compiled: bool) -> None:
    book = GrammarCache()
    book.need("r", "text", "", ONE)
    entry = book.next()
    assert entry is not None
    book.ended("r")
    book.compiled(entry, made() if compiled else None)
    book.validate()
    again = book.need("s", "text", "", ONE)
    assert (again is entry) == compiled
