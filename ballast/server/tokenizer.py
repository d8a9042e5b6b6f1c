"""A model's tokenizer and chat template, as the server needs them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from ballast.core.errors import CheckpointError, InvalidRequest
from ballast.server.detokenize import (
    ByteDetokenizer,
    Detokenizer,
    WindowDetokenizer,
    token_bytes_of,
)

log = logging.getLogger(__name__)

LONG_TEXT = 8192
"""Characters from which tokenising takes longer (milliseconds) than other requests should wait."""


class Tokenizer:
    """Safe to use from several threads."""

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer` is one of `transformers`."""
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._lock = threading.Lock()
        """Held while `_tokenizer` is used: only the backend may be shared by threads."""
        special = {int(i) for i in tokenizer.all_special_ids}
        self._token_bytes = None
        if self._backend is not None:
            added = self._backend.get_added_tokens_decoder()
            special.update(i for i, token in added.items() if token.special)
            self._backend.no_truncation()
            self._backend.no_padding()
            self._token_bytes = token_bytes_of(self._backend, special)
        self.special_ids = frozenset(special)

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """From a checkpoint's directory; code in it is not run. Raises CheckpointError."""
        from transformers import AutoTokenizer

        try:
            loaded = AutoTokenizer.from_pretrained(
                str(path), trust_remote_code=False, local_files_only=True
            )
        except Exception as error:  # whatever a broken file makes the library raise
            raise CheckpointError(str(path), None, f"no usable tokenizer: {error}") from error
        return cls(loaded)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids; `special`: with what the tokenizer puts around a text (say, its BOS)."""
        if self._backend is not None:
            return list(self._backend.encode(text, add_special_tokens=special).ids)
        with self._lock:
            return list(self._tokenizer(text, add_special_tokens=special)["input_ids"])

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation, up to where the answer begins.

        Raises InvalidRequest if there is no chat template or it does not accept the messages.
        """
        if not self._tokenizer.chat_template:
            raise InvalidRequest("this model has no chat template; use /v1/completions", "messages")
        try:
            with self._lock:
                text = self._tokenizer.apply_chat_template(
                    list(messages), tokenize=False, add_generation_prompt=True
                )
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            raise InvalidRequest(
                f"the model's chat template does not accept these messages: {error}", "messages"
            ) from error
        # The template writes special tokens itself.
        return self.encode(text, special=False)

    def detokenizer(self) -> Detokenizer:
        """For one output."""
        if self._token_bytes is not None:
            return ByteDetokenizer(self._token_bytes)
        return WindowDetokenizer(self._decode)

    def token_text(self, token: int) -> tuple[str, bytes]:
        """A single token as text and as bytes, for log-probabilities."""
        if self._token_bytes is not None and token not in self.special_ids:
            raw = self._token_bytes(token)
            return raw.decode(errors="replace"), raw
        with self._lock:
            text = self._tokenizer.decode([token])
        return text, text.encode()

    def special_token(self, text: str) -> int | None:
        """The special token that is written so, if any."""
        with self._lock:
            token = self._tokenizer.convert_tokens_to_ids(text)
        return token if token in self.special_ids else None

    def _decode(self, tokens: list[int]) -> str:
        with self._lock:
            return str(self._tokenizer.decode(tokens, skip_special_tokens=True))


def long_to_tokenize(messages: Sequence[Mapping[str, Any]] | str) -> bool:
    """Whether tokenising would hold up an event loop for noticeable time."""
    if isinstance(messages, str):
        return len(messages) > LONG_TEXT
    return sum(len(str(m.get("content") or "")) for m in messages) > LONG_TEXT
