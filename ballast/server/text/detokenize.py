"""Convert tokens to text as they arrive, never ending a piece of text within a character.

Most tokenizers spell tokens as bytes (byte-level BPE, or characters with byte fallback). For these
the text is exact and each token costs the same; for the rest, a short window is decoded again.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Collection
from typing import Any, Protocol

WINDOW = 8
"""Tokens that `WindowDetokenizer` decodes together; more while a character is incomplete."""
GARBAGE = 4 * WINDOW
"""Tokens after which an incomplete character is taken as invalid."""


class Detokenizer(Protocol):
    """Converts the tokens of one output to text."""

    def push(self, token: int) -> str:
        """Return the characters that `token` completes; may be empty."""

    def flush(self) -> str:
        """Return the rest of the text at the end of the output, incomplete characters as U+FFFD."""


TokenBytes = Callable[[int], bytes]
"""Maps a token to its bytes; empty for special tokens and ids that the tokenizer lacks."""


class ByteDetokenizer:
    """Joins the bytes of tokens. Bytes that are not UTF-8 become U+FFFD, as in Python."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(self._bytes(token))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """Decodes a window of recent tokens, and returns the text that the new one adds: for tokenizers
    that can only decode sequences."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._said = 0
        """Characters of the window's text that were returned."""

    def push(self, token: int) -> str:
        self._window.append(token)
        text = self._decode(self._window)
        whole = len(text)
        if text.endswith("\ufffd") and len(self._window) < GARBAGE:
            whole = len(text.rstrip("\ufffd"))  # may become a character yet
        new = text[self._said : whole]
        self._said = max(self._said, whole)
        if self._said >= len(text) and len(self._window) > WINDOW:
            self._window = self._window[-WINDOW // 2 :]
            self._said = len(self._decode(self._window))
        return new

    def flush(self) -> str:
        rest = self._decode(self._window)[self._said :]
        self._window, self._said = [], 0
        return rest


def token_bytes_of(backend: Any, special: Collection[int]) -> TokenBytes | None:
    """Return the bytes by token of a `tokenizers.Tokenizer`, empty for `special`; None if its
    tokens are not spelled in bytes."""
    state = backend.decoder.__getstate__() if backend.decoder is not None else b"null"
    kinds = _kinds(json.loads(state))
    if "ByteLevel" in kinds:
        spell = _byte_level
    elif "ByteFallback" in kinds:
        spell = _byte_fallback
    else:
        return None
    cache: dict[int, bytes] = dict.fromkeys(special, b"")

    def token_bytes(token: int) -> bytes:
        found = cache.get(token)
        if found is None:
            text = backend.id_to_token(token)
            found = cache[token] = b"" if text is None else spell(text)
        return found

    return token_bytes


def _kinds(decoder: Any) -> set[str]:
    """Types of a decoder and, of a sequence, of its members."""
    if not isinstance(decoder, dict):
        return set()
    return {decoder["type"]}.union(*map(_kinds, decoder.get("decoders", ())))


def _alphabet() -> dict[str, int]:
    """Bytes by the characters with which byte-level BPE spells them (Radford et al. 2019,
    `encoder.py`)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    shifted = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(shifted)}


_BYTE_OF = _alphabet()
_META_SPACE = "\u2581"


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF[c] for c in token])
    except KeyError:  # an added token, written as it is
        return token.encode()


def _byte_fallback(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace(_META_SPACE, " ").encode()
