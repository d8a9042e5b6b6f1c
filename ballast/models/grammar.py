"""Grammars: which tokens an output may go on with, by llguidance, from the tokens it has so far."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ballast.core.errors import InvalidRequest

log = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]


@dataclass(slots=True)
class _Progress:
    """A matcher, and the output that it has seen."""

    grammar: str
    matcher: Any
    seen: list[int]


class Grammars:
    """The matchers of one model's requests; one thread at a time.

    What they answer is a function of (grammar, output) alone: a matcher is only kept to save the
    work of going through the output again, and made anew where it is gone or does not fit.
    """

    def __init__(self, directory: Path, vocab: int, eos: Sequence[int], keep: int) -> None:
        """`directory`: has the model's tokenizer, which is loaded when first needed. `vocab`: width
        of the logits. `keep`: most matchers kept."""
        self.aside: Callable[[], AbstractContextManager[object]] = nullcontext
        """Entered while the tokenizer is loaded: what that allocates is no activation."""
        self._directory = directory
        self._vocab = vocab
        self._eos = list(eos)
        self._keep = keep
        self._tokenizer: Any = None
        self._open: OrderedDict[str, _Progress] = OrderedDict()

    def allowed(self, request_id: str, grammar: str, output: Sequence[int]) -> Array:
        """(vocab,) bool: what may follow `output`. At least one token: a complete one may end.

        Raises InvalidRequest for a grammar that cannot be followed, and where the model has no
        tokenizer that llguidance can use.
        """
        at = self._at(request_id, grammar, list(output))
        bits = np.frombuffer(at.matcher.compute_bitmask(), np.uint8)
        mask = np.unpackbits(bits, count=self._vocab, bitorder="little").view(np.bool_)
        self._check(request_id, at)
        if not mask.any():
            raise InvalidRequest("the grammar allows no token here")
        return mask

    def ends(self, request_id: str, token: int) -> bool:
        """Whether the output is complete with `token`, one of those that were just allowed."""
        at = self._open[request_id]
        at.matcher.consume_token(token)
        at.seen.append(token)
        if not at.matcher.is_stopped():
            return False
        del self._open[request_id]
        return True

    def _at(self, request_id: str, grammar: str, output: list[int]) -> _Progress:
        at = self._open.get(request_id)
        if at is None or at.grammar != grammar or at.seen != output[: len(at.seen)]:
            from llguidance import LLMatcher

            if self._tokenizer is None:
                with self.aside():
                    self._tokenizer = self._load()
            at = self._open[request_id] = _Progress(
                grammar, LLMatcher(self._tokenizer, grammar), []
            )
            self._check(request_id, at)
        rest = output[len(at.seen) :]
        if rest:
            at.matcher.consume_tokens(rest)
            at.seen += rest
            self._check(request_id, at)
        self._open.move_to_end(request_id)
        while len(self._open) > self._keep:
            self._open.popitem(last=False)
        return at

    def _check(self, request_id: str, at: _Progress) -> None:
        if at.matcher.is_error():
            del self._open[request_id]
            reason = at.matcher.get_error().partition("\n")[0]
            raise InvalidRequest(f"the grammar cannot be followed: {reason}")

    def _load(self) -> Any:
        """The model's tokenizer as llguidance wants it: a second, and a kilobyte a token."""
        begun = time.perf_counter()
        try:
            from llguidance.hf import from_tokenizer
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(
                str(self._directory), trust_remote_code=False, local_files_only=True
            )
            made = from_tokenizer(tokenizer, n_vocab=self._vocab, eos_token=self._eos or None)
        except Exception as error:  # whatever a broken file makes the libraries raise
            raise InvalidRequest(f"no grammars for this model's tokenizer: {error}") from error
        seconds = time.perf_counter() - begun
        log.info("grammars for %s: made ready in %.2f s", self._directory, seconds)
        return made
