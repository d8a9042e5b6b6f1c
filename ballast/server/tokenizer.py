"""A model's tokenizer and chat template, as the server needs them."""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ballast.core.errors import CheckpointError, InvalidRequest
from ballast.server.detokenize import (
    ByteDetokenizer,
    Detokenizer,
    WindowDetokenizer,
    token_bytes_of,
)
from ballast.server.tools import ToolDialect

log = logging.getLogger(__name__)

LONG_TEXT = 8192
"""Characters from which tokenising takes longer (milliseconds) than other requests should wait."""


class Tokenizer:
    """Safe to use from several threads."""

    def __init__(self, tokenizer: Any, tool_parser: str = "auto") -> None:
        """`tokenizer` is one of `transformers`. Raises ConfigError for an unknown `tool_parser`."""
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._lock = threading.Lock()
        """Held while `_tokenizer` is used: only the backend may be shared by threads."""
        special = {int(i) for i in tokenizer.all_special_ids}
        self._token_bytes = self._all_bytes = self._marked_bytes = None
        self.dialect = ToolDialect.of(self._tools_template, tool_parser, self.token_id)
        """How the model calls functions; None if it does not."""
        markers = self.dialect.marker_tokens.values() if self.dialect is not None else ()
        self._hidden = special.difference(markers)
        """Special tokens without those that stand around calls."""
        if self._backend is not None:
            added = self._backend.get_added_tokens_decoder()
            special.update(i for i, token in added.items() if token.special)
            self._backend.no_truncation()
            self._backend.no_padding()
            self._token_bytes = token_bytes_of(self._backend, special)
            self._marked_bytes = token_bytes_of(self._backend, self._hidden)
            self._all_bytes = token_bytes_of(self._backend, ())
        self.special_ids = frozenset(special)
        self._reserved = set(inspect.signature(tokenizer.apply_chat_template).parameters)
        """What a template cannot be given by the name: it means something else."""

    @staticmethod
    def prepare() -> None:
        """Import what loading takes, which is seconds."""
        from transformers import AutoTokenizer  # noqa: F401

    @classmethod
    def load(cls, path: str | Path, tool_parser: str = "auto") -> Tokenizer:
        """From a checkpoint's directory; code in it is not run. Raises CheckpointError, and
        ConfigError for an unknown `tool_parser`."""
        from transformers import AutoTokenizer

        try:
            loaded = AutoTokenizer.from_pretrained(
                str(path), trust_remote_code=False, local_files_only=True
            )
        except Exception as error:  # whatever a broken file makes the library raise
            raise CheckpointError(str(path), None, f"no usable tokenizer: {error}") from error
        return cls(loaded, tool_parser)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids; `special`: with what the tokenizer puts around a text (say, its BOS)."""
        if self._backend is not None:
            return list(self._backend.encode(text, add_special_tokens=special).ids)
        with self._lock:
            return list(self._tokenizer(text, add_special_tokens=special)["input_ids"])

    @property
    def template(self) -> str:
        """The chat template; empty if there is none."""
        template = self._tokenizer.chat_template
        if isinstance(template, Mapping):  # by name
            template = template.get("default")
        return str(template or "")

    @property
    def _tools_template(self) -> str:
        """The chat template where there are tools."""
        template = self._tokenizer.chat_template
        if isinstance(template, Mapping) and "tool_use" in template:
            return str(template["tool_use"])
        return self.template

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        answer: bool = True,
        continued: bool = False,
        more: Mapping[str, Any] | None = None,
        special: bool = False,
    ) -> list[int]:
        """Token ids of a conversation; `more` reaches the template.

        With `answer` up to where the answer begins; if `continued`, up to the end of the last
        message, which the answer goes on with. `special`: with what the tokenizer puts around any
        text; templates write it themselves. Raises InvalidRequest if there is no chat template or
        it does not accept the messages.
        """
        if not self._tokenizer.chat_template:
            raise InvalidRequest("this model has no chat template; use /v1/completions", "messages")
        reserved = self._reserved.intersection(more or ())
        if reserved:
            named = ", ".join(sorted(reserved))
            raise InvalidRequest(
                f"chat_template_kwargs: {named} cannot be set so", "chat_template_kwargs"
            )
        try:
            with self._lock:
                text = self._tokenizer.apply_chat_template(
                    list(messages),
                    tools=list(tools) if tools else None,
                    tokenize=False,
                    add_generation_prompt=answer and not continued,
                    continue_final_message=continued,
                    **(more or {}),
                )
            text.encode()  # half a surrogate pair may have come in by any key of a message
        except Exception as error:  # a template is code, and may raise anything
            raise InvalidRequest(
                f"the model's chat template does not accept these messages: {error}", "messages"
            ) from error
        return self.encode(text, special=special)

    def detokenizer(self, *, special: bool = False, markers: bool = False) -> Detokenizer:
        """For one output; `special`: special tokens have text, too; `markers`: those that stand
        around calls of functions have."""
        shown = self._marked_bytes if markers else self._token_bytes
        token_bytes = self._all_bytes if special else shown
        if token_bytes is not None:
            return ByteDetokenizer(token_bytes)
        hidden = self._hidden if markers and not special else ()
        return WindowDetokenizer(lambda tokens: self._decode(tokens, special or markers, hidden))

    def decode(self, tokens: Sequence[int]) -> str:
        """Their text, special tokens included."""
        with self._lock:
            return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))

    def spelled(self, tokens: Sequence[int]) -> list[str]:
        """Tokens as the vocabulary spells them; one that it lacks is empty."""
        with self._lock:
            found = self._tokenizer.convert_ids_to_tokens(list(tokens))
        return [token or "" for token in found]

    def token_text(self, token: int) -> tuple[str, bytes]:
        """A single token as text and as bytes, for log-probabilities."""
        if self._token_bytes is not None and token not in self.special_ids:
            raw = self._token_bytes(token)
            return raw.decode(errors="replace"), raw
        with self._lock:
            text = self._tokenizer.decode([token])
        return text, text.encode()

    def token_id(self, text: str) -> int | None:
        """The single token that is written so, special or not, if there is one."""
        with self._lock:
            token = self._tokenizer.convert_tokens_to_ids(text)
            found = token is not None and self._tokenizer.convert_ids_to_tokens(token) == text
        return int(token) if found else None

    def special_token(self, text: str) -> int | None:
        """The special token that is written so, if any."""
        with self._lock:
            token = self._tokenizer.convert_tokens_to_ids(text)
        return token if token in self.special_ids else None

    def _decode(self, tokens: list[int], special: bool, hidden: Collection[int]) -> str:
        tokens = [t for t in tokens if t not in hidden]
        with self._lock:
            return str(self._tokenizer.decode(tokens, skip_special_tokens=not special))


def long_to_tokenize(messages: Sequence[Mapping[str, Any]] | str) -> bool:
    """Whether tokenising would hold up an event loop for noticeable time."""
    if isinstance(messages, str):
        return len(messages) > LONG_TEXT
    return sum(len(str(m.get("content") or "")) for m in messages) > LONG_TEXT
