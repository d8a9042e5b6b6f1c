"""Compile grammars of structured outputs on a thread beside the lanes, each once.

Implements the engine's `GrammarStore` for live devices, within bounds of number and memory.
A request with a grammar is paused until it is compiled (`core.request.WaitsFor.GRAMMAR`), in no
batch and on no lane. One thread compiles; API keys take turns at it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from ballast.core.errors import DeviceError, InvalidRequest
from ballast.core.event import Event, GrammarReadyEvent
from ballast.core.request import Request
from ballast.live.grammar_cache import CachedGrammar, GrammarCache
from ballast.models.grammar import CompiledGrammar, Grammars, GrammarTokenizer, compile_grammar

log = logging.getLogger(__name__)


class GrammarCompiler:
    """Implements `GrammarStore`, whose methods are for the loop's thread."""

    def __init__(
        self,
        post: Callable[[Event], None],
        lost: Callable[[DeviceError], object],
        beside: Callable[[], AbstractContextManager[object]],
        exempt: Callable[[int], None],
        compile: Callable[[Any, str], CompiledGrammar] = compile_grammar,
    ) -> None:
        """`post` takes events; `lost` is called if the thread ends though it should not. `beside()`
        is entered while a tokenizer is loaded beside jobs; `exempt(n_bytes)` is called with what
        compiled grammars take."""
        self._post, self._lost = post, lost
        self._beside, self._exempt, self._compile = beside, exempt, compile
        self._models: Mapping[str, Grammars] = {}
        """Makers of matchers by model; the mapping is replaced, never changed."""
        self._tokenizers: dict[str, Any] = {}
        """Tokenizers of served models, by `GrammarTokenizer.key`. Used by the thread only."""
        self._change = threading.Condition()
        """Held while `book` or `_closing` are used."""
        self.book = GrammarCache()
        self._closing = False
        self._thread = threading.Thread(target=self._live, name="grammars", daemon=True)
        self._thread.start()

    # -- from any thread --------------------------------------------------------------------------

    def serve(self, model: str, grammars: Grammars) -> None:
        """Accept requests for a model, whose matchers `grammars` makes."""
        self._models = {**self._models, model: grammars}

    def forget(self, model: str) -> None:
        """Forget a model that has been removed and has no requests."""
        self._models = {name: g for name, g in self._models.items() if name != model}

    def close(self) -> None:
        """End the thread after the grammar that it is compiling."""
        with self._change:
            self._closing = True
            self._change.notify()
        self._thread.join()

    # -- the loop's thread ------------------------------------------------------------------------

    def prepare(self, request: Request) -> None:
        s = request.submission
        with self._change:
            found = self.book.need(
                request.id, s.sampling.grammar, s.tenant, self._models[request.model]
            )
            if isinstance(found, str):
                self._post(GrammarReadyEvent(request.id, "queue_full", found))
            elif found.compiled is not None:
                self._ready(found, request.id)
            else:
                self._change.notify()

    def release(self, request: Request) -> None:
        with self._change:
            self.book.ended(request.id)
            self._change.notify()

    # -- the thread -------------------------------------------------------------------------------

    def _live(self) -> None:
        lost = DeviceError("grammars", "the thread that compiles them has ended")
        try:
            while (entry := self._next()) is not None:
                self._make(entry)
        except BaseException:
            self._lost(lost)
            log.critical("the thread that compiles grammars has ended", exc_info=True)

    def _next(self) -> tuple[CachedGrammar, GrammarTokenizer] | None:
        """Wait for the next grammar to compile and return it; None: the thread ends."""
        with self._change:
            while not self._closing:
                entry = self.book.next()
                if entry is not None:
                    return entry, next(iter(entry.users.values())).tokenizer
                self._change.wait()
        return None

    def _make(self, wanted: tuple[CachedGrammar, GrammarTokenizer]) -> None:
        entry, tokenizer = wanted
        compiled, error = None, ""
        try:
            compiled = self._compile(self._loaded(tokenizer), entry.text)
        except InvalidRequest as refusal:
            error = str(refusal)
        except BaseException as fault:  # a fault, or a panic, of the library: the next may be sound
            log.exception("a grammar could not be compiled")
            error = f"the grammar cannot be compiled: {type(fault).__name__}"
        with self._change:
            self.book.compiled(entry, compiled)
            for request_id in entry.users:
                if compiled is not None:
                    self._ready(entry, request_id)
                else:
                    self._post(GrammarReadyEvent(request_id, InvalidRequest.code, error))
            self._exempt(self.book.estimated_bytes)

    def _loaded(self, tokenizer: GrammarTokenizer) -> Any:
        if tokenizer.key not in self._tokenizers:
            served = {g.tokenizer.key for g in self._models.values()}
            self._tokenizers = {k: t for k, t in self._tokenizers.items() if k in served}
            with self._beside():
                self._tokenizers[tokenizer.key] = tokenizer.load()
        return self._tokenizers[tokenizer.key]

    def _ready(self, entry: CachedGrammar, request_id: str) -> None:
        """Resume a request whose grammar has been compiled."""
        assert entry.compiled is not None
        entry.users[request_id].hold(request_id, entry.compiled)
        self._post(GrammarReadyEvent(request_id))
