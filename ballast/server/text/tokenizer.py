"""Wrap a checkpoint's tokenizer (`transformers`): encode and decode."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from ballast.core.errors import (
    BallastError,
    CheckpointError,
    TokenizerFailed,
    brief,
)
from ballast.core.model import ModelSpec
from ballast.fleet.unfinished_download import unfinished
from ballast.memory.syscalls import malloc_trim
from ballast.server.text.detokenize import (
    ByteDetokenizer,
    Detokenizer,
    TokenBytes,
    WindowDetokenizer,
    token_bytes_of,
)
from ballast.server.text.model_template import ChatTemplate
from ballast.server.text.reasoning import ReasoningTags
from ballast.server.text.text_bound import text_bound
from ballast.server.tools.dialect import ToolDialect

LONG_TEXT = 1024
"""Characters from which tokenizing is done off the event loop: it takes a millisecond."""
HUGE_TEXT = 1 << 18
"""Characters from which tokenizing takes most of a second, and so much memory that it is returned
to the system afterwards."""


class TooManyTokens(Exception):
    """A text has more tokens than allowed. `found`: their number, None if not counted."""

    def __init__(self, characters: int, found: int | None) -> None:
        super().__init__(characters, found)
        self.characters, self.found = characters, found


class Tokenizer:
    """A model's tokenizer, chat template and tool-call dialect. Safe from several threads."""

    def __init__(self, tokenizer: Any, tool_parser: str = "auto") -> None:
        """`tokenizer`: one of `transformers`. Raises ConfigError for an unknown `tool_parser`."""
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._lock: contextlib.AbstractContextManager[object] = (
            threading.Lock() if self._backend is None else contextlib.nullcontext()
        )
        """Held while `_tokenizer` is used: only tokenizers with a backend are safe from several
        threads."""
        self._bound = None
        special = {int(i) for i in tokenizer.all_special_ids}
        self._token_bytes: TokenBytes | None = None
        self._bytes_by_hidden: dict[frozenset[int], TokenBytes | None] = {}
        """Bytes of tokens, by the special tokens that have none."""
        self.chat = ChatTemplate(tokenizer)
        self.dialect = ToolDialect.of(self.chat.with_tools, tool_parser, self.token_id)
        """Syntax of the model's tool calls; None if it has none."""
        self.reasoning = ReasoningTags.of(
            self.chat.text, getattr(tokenizer, "response_template", None)
        )
        """Tags around the model's reasoning; None if it writes none."""
        if self._backend is not None:
            added = self._backend.get_added_tokens_decoder()
            special.update(i for i, token in added.items() if token.special)
            self._backend.no_truncation()
            self._backend.no_padding()
            self._bound = text_bound(self._backend)
        self.special_ids = frozenset(special)
        self._token_bytes = self._bytes_without(self.special_ids)

    @property
    def call_tokens(self) -> frozenset[int]:
        """Markers of tool calls that are single tokens."""
        return frozenset(() if self.dialect is None else self.dialect.marker_tokens.values())

    @cached_property
    def reasoning_tokens(self) -> frozenset[int]:
        """Special tokens within the tags of reasoning."""
        markers = () if self.reasoning is None else self.reasoning.markers
        found = (self.special_token(marker) for marker in markers)
        return frozenset(token for token in found if token is not None)

    @staticmethod
    def prepare() -> None:
        """Import `transformers` ahead of `load`, which takes seconds."""
        from transformers import AutoTokenizer  # noqa: F401

    @classmethod
    def load(cls, path: str | Path, tool_parser: str = "auto") -> Tokenizer:
        """Load from a checkpoint's directory, without running code in it. Raises CheckpointError,
        and ConfigError for an unknown `tool_parser`."""
        from transformers import AutoTokenizer

        try:
            with _failures():
                loaded = AutoTokenizer.from_pretrained(
                    str(path), trust_remote_code=False, local_files_only=True
                )
                return cls(loaded, tool_parser)
        except TokenizerFailed as error:
            why = unfinished(Path(path)) or brief(error.__cause__ or error)
            raise CheckpointError(str(path), None, f"no usable tokenizer: {why}") from error

    def encode(self, text: str, *, special: bool = True, most: int | None = None) -> list[int]:
        """Encode a text as token ids; `special`: add the tokenizer's special tokens (say, its BOS).

        Raises TooManyTokens where there are more than `most`, before tokenizing if the text's
        length alone proves it, and TokenizerFailed. With a backend, other threads run meanwhile.
        """
        if most is not None and self._bound is not None and self._bound.exceeds(text, most):
            raise TooManyTokens(len(text), None)
        with _failures():
            found, ids = self._encoded(text, special, most)
        if ids is None or (most is not None and found > most):
            raise TooManyTokens(len(text), found)
        return ids

    def encode_pair(self, first: str, second: str, most: int) -> tuple[list[int], int]:
        """Encode a pair of texts as a cross encoder wants it; returns the token ids, and the first
        position of the second text, 0 where the tokenizer does not tell them apart.

        Raises TooManyTokens where there are more than `most`, and TokenizerFailed."""
        with _failures(), self._lock:
            found = self._tokenizer(first, second, return_token_type_ids=True, verbose=False)
        ids = list(found["input_ids"])
        if len(ids) > most:
            raise TooManyTokens(len(first) + len(second), len(ids))
        types = list(found["token_type_ids"])
        return ids, types.index(1) if 1 in types else 0

    def _encoded(self, text: str, special: bool, most: int | None) -> tuple[int, list[int] | None]:
        """Number of tokens, and the tokens unless there are more than `most`."""
        if self._backend is None:
            with self._lock:
                ids = list(self._tokenizer(text, add_special_tokens=special)["input_ids"])
            return len(ids), ids
        # `encode` would hold the interpreter lock throughout.
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=special)
        found = len(encoding)
        kept = list(encoding.ids) if most is None or found <= most else None
        if len(text) > HUGE_TEXT:
            del encoding
            malloc_trim()
        return found, kept

    def chat_ends(self, spec: ModelSpec) -> tuple[int, ...]:
        """Return the tokens that end an answer in a conversation: the model's end tokens, and that
        of the tokenizer's own configuration."""
        own = self._tokenizer.eos_token_id
        more = (own,) if isinstance(own, int) and 0 <= own < spec.vocab else ()
        return tuple(dict.fromkeys((*spec.eos_token_ids, *more)))

    def tokens_beyond(self, vocab: int) -> list[str]:
        """Return the tokens whose ids are `vocab` or more, by id."""
        with self._lock:
            known = self._tokenizer.get_vocab()
        return [token for id, token in sorted((i, t) for t, i in known.items()) if id >= vocab]

    def detokenizer(self, *, special: bool = False, shown: Collection[int] = ()) -> Detokenizer:
        """Create the detokenizer of one output; `special`: special tokens have text, too; `shown`:
        special tokens that have it anyway."""
        hidden = frozenset() if special else self.special_ids.difference(shown)
        token_bytes = self._bytes_without(hidden)
        if token_bytes is not None:
            return ByteDetokenizer(token_bytes)
        some = special or bool(shown)
        return WindowDetokenizer(lambda tokens: self._decode(tokens, some, hidden if some else ()))

    def _bytes_without(self, hidden: frozenset[int]) -> TokenBytes | None:
        """Bytes of tokens, none for those `hidden`; None if tokens are not spelled in bytes."""
        if self._backend is None:
            return None
        if hidden not in self._bytes_by_hidden:
            self._bytes_by_hidden[hidden] = token_bytes_of(self._backend, hidden)
        return self._bytes_by_hidden[hidden]

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode tokens, special ones included."""
        with self._lock, _failures():
            return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))

    def spelled(self, tokens: Sequence[int]) -> list[str]:
        """Return tokens as the vocabulary spells them; empty for ids that it lacks."""
        with self._lock, _failures():
            found = self._tokenizer.convert_ids_to_tokens(list(tokens))
        return [token or "" for token in found]

    def token_text(self, token: int) -> tuple[str, bytes]:
        """Decode a single token as text and as bytes, for log-probabilities."""
        if self._token_bytes is not None and token not in self.special_ids:
            raw = self._token_bytes(token)
            return raw.decode(errors="replace"), raw
        with self._lock, _failures():
            text = self._tokenizer.decode([token])
        return text, text.encode()

    def token_id(self, text: str) -> int | None:
        """Return the id of the single token, special or not, that is spelled `text`; None without
        one."""
        with self._lock, _failures():
            token = self._tokenizer.convert_tokens_to_ids(text)
            found = token is not None and self._tokenizer.convert_ids_to_tokens(token) == text
        return int(token) if found else None

    def special_token(self, text: str) -> int | None:
        """Return the id of the special token that is spelled `text`; None without one."""
        with self._lock, _failures():
            token = self._tokenizer.convert_tokens_to_ids(text)
        return token if token in self.special_ids else None

    def _decode(self, tokens: list[int], special: bool, hidden: Collection[int]) -> str:
        tokens = [t for t in tokens if t not in hidden]
        with self._lock, _failures():
            return str(self._tokenizer.decode(tokens, skip_special_tokens=not special))


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    """Raise whatever the tokenizer's library raises as TokenizerFailed. A panic of its native code
    is no Exception, and would pass by all handlers of a request's errors."""
    try:
        yield
    except (BallastError, TooManyTokens, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise TokenizerFailed(error) from error
