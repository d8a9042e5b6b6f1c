"""Compute which tokens an output may continue with, from its grammar and its tokens so far.

By llguidance. A grammar is compiled once for a tokenizer (`compile_grammar`, which may take a
second and must not run on a lane); each request has a matcher of its own, a cheap copy
(`Grammars`).
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ballast.core.errors import BrokenPromise, InvalidRequest
from ballast.weights.tokenizer_files import digest_of

log = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]

MOST_LEXER_STATES = 65_536
"""Most lexer states of one grammar, all of its outputs together; some 0.5 KiB each."""
FIXED_BYTES, BYTES_PER_CHARACTER = 64 << 10, 96
"""Bytes of a compiled grammar: measured 30 to 90 bytes a character of schemas and lists of
choices, with what the first mask adds over a vocabulary of 128,000."""


class GrammarTokenizer:
    """A checkpoint's tokenizer for llguidance. Tokenizers with equal `key`s are equal."""

    def __init__(self, directory: Path, vocab: int, eos: Sequence[int], files: str = "") -> None:
        """`vocab`: width of the logits; `files`: digest of the tokenizer's files when the model was
        loaded; empty: as they are now. Loads nothing yet."""
        self._directory, self._vocab, self._eos = directory, vocab, list(eos)
        self._files = files or digest_of(directory)
        self.key = hashlib.sha256(json.dumps([vocab, *eos, self._files]).encode()).hexdigest()

    def load(self) -> Any:
        """Return an `LLTokenizer`; takes seconds, and 0.6 KiB a token. Raises InvalidRequest if the
        model has no tokenizer that llguidance can use, or its files are not those it was loaded
        with."""
        begun = time.perf_counter()
        try:
            if digest_of(self._directory) != self._files:
                raise FileNotFoundError("its files have changed or gone since the model was loaded")
            from llguidance.hf import from_tokenizer
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(
                str(self._directory), trust_remote_code=False, local_files_only=True
            )
            made = from_tokenizer(tokenizer, n_vocab=self._vocab, eos_token=self._eos or None)
        except Exception as error:  # the libraries may raise anything for a broken file
            raise InvalidRequest(f"no grammars for this model's tokenizer: {error}") from error
        seconds = time.perf_counter() - begun
        log.info("grammars for %s: made ready in %.2f s", self._directory, seconds)
        return made


class CompiledGrammar:
    """A grammar compiled for a tokenizer. Its matchers share one lexer, whose states grow with
    use."""

    def __init__(self, prototype: Any) -> None:
        self._prototype = prototype
        self.broken = False
        """Whether a matcher of it has failed: others may, as they share its lexer, so it is not
        used again."""

    def matcher(self) -> Any:
        """Return an `LLMatcher` for a new output, in microseconds."""
        return self._prototype.deep_copy()


def compile_grammar(tokenizer: Any, text: str) -> CompiledGrammar:
    """Compile `text`, in llguidance's format, and its first mask; other threads go on meanwhile.

    Time and memory are bounded by llguidance's limits. Raises InvalidRequest for a grammar that
    cannot be followed.
    """
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(max_lexer_states=MOST_LEXER_STATES)
    prototype = LLMatcher(tokenizer, text, log_level=0, limits=limits)
    if not prototype.is_error():
        prototype.compute_bitmask()  # up to a tenth of a second, spared in copies
    _check(prototype)
    return CompiledGrammar(prototype)


def estimated_bytes(text: str) -> int:
    """Estimate the bytes of a compiled grammar."""
    return FIXED_BYTES + BYTES_PER_CHARACTER * len(text)


class Matcher:
    """State of one output within its grammar."""

    def __init__(self, compiled: CompiledGrammar, vocab: int) -> None:
        self._compiled, self._vocab = compiled, vocab
        self._matcher = compiled.matcher()
        self._seen: list[int] = []

    def follows(self, output: Sequence[int]) -> bool:
        """Whether `output` continues the tokens seen so far, and the matcher may still be used."""
        seen = self._seen
        return not self._matcher.is_error() and seen == list(output[: len(seen)])

    def allowed(self, output: Sequence[int]) -> Array:
        """Return the mask (vocab,) bool of tokens that may continue `output`, which it `follows`;
        at least one token: a complete output may end.

        Raises InvalidRequest if the matcher fails.
        """
        rest = list(output[len(self._seen) :])
        if rest:
            self._matcher.consume_tokens(rest)
            self._seen += rest
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        mask = np.unpackbits(bits, count=self._vocab, bitorder="little").view(np.bool_)
        try:
            _check(self._matcher)
        except InvalidRequest:
            self._compiled.broken = True
            raise
        if not mask.any():
            raise InvalidRequest("the grammar allows no token here")
        return mask

    def ends(self, token: int) -> bool:
        """Whether the output is complete with `token`, one of those that were just allowed."""
        self._matcher.consume_token(token)
        self._seen.append(token)
        return bool(self._matcher.is_stopped())


class Grammars:
    """The matchers of one model's open requests.

    Results depend on (grammar, output) alone: a matcher is only kept to avoid processing the output
    again, and made anew if it does not fit. `hold` and `release` are callable from any thread, all
    else only by the lane that runs the model.
    """

    def __init__(self, directory: Path, vocab: int, eos: Sequence[int], files: str = "") -> None:
        """Parameters: as of `GrammarTokenizer`."""
        self.tokenizer = GrammarTokenizer(directory, vocab, eos, files)
        self._vocab = vocab
        self._held: dict[str, CompiledGrammar] = {}
        """Grammars by request, from before it is admitted until it has ended."""
        self._matchers: dict[str, Matcher] = {}
        """Matchers by request, for some of those in `_held`."""

    def hold(self, request_id: str, compiled: CompiledGrammar) -> None:
        """Register the grammar of a request, which may run from now on."""
        self._held[request_id] = compiled

    def release(self, request_id: str) -> None:
        """Forget the grammar of a request that has ended and is in no job."""
        self._held.pop(request_id, None)
        self._matchers.pop(request_id, None)

    def matcher(self, request_id: str, output: Sequence[int]) -> Matcher:
        """Return the matcher of a request with this output. Raises BrokenPromise if its grammar was
        not registered: a lane never waits for a grammar to be compiled."""
        matcher = self._matchers.get(request_id)
        if matcher is None or not matcher.follows(output):
            if request_id not in self._held:
                raise BrokenPromise(f"{request_id}: its grammar has not been compiled")
            matcher = Matcher(self._held[request_id], self._vocab)
            self._matchers[request_id] = matcher
        return matcher


def _check(matcher: Any) -> None:
    if matcher.is_error():
        reason = matcher.get_error().partition("\n")[0]
        raise InvalidRequest(f"the grammar cannot be followed: {reason}")
