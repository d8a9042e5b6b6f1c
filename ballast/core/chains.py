"""Compute keyed digests of prompt blocks, which show shared prefixes without revealing tokens.

Used by the story, so that a replay has the same prefix-cache hits, and by the simulator's stand-in
tokens. Two chains with one key and one root agree in as many leading blocks as the sequences do.
Without the key, guesses of tokens cannot be checked against a digest.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

DIGEST_BYTES = 8


class Chain:
    """Chain of block digests of one sequence, which only grows."""

    __slots__ = ("_key", "_last", "_size", "_tail", "tokens")

    def __init__(self, key: bytes, root: str, block_tokens: int) -> None:
        """`key`: up to 64 bytes; `root`: separates chains of different models or salts."""
        self._key = key
        self._last = digest(key, root.encode())
        self._size = block_tokens
        self._tail: list[int] = []
        """Tokens of the last block, which is not full."""
        self.tokens = 0
        """Number of tokens so far."""

    def add(self, token: int) -> bytes:
        """Append a token; return the digest of the block that it fills, or empty bytes."""
        if len(self._tail) + 1 == self._size:
            return self.push((token,))
        self._tail.append(token)
        self.tokens += 1
        return b""

    def push(self, tokens: Sequence[int]) -> bytes:
        """Append tokens; return the concatenated digests of the blocks that they fill."""
        tail, size = self._tail, self._size
        tail += tokens
        self.tokens += len(tokens)
        full = len(tail) // size
        if not full:
            return b""
        raw = array("q", tail[: full * size]).tobytes()
        del tail[: full * size]
        found = []
        for at in range(0, len(raw), 8 * size):
            self._last = digest(self._key, self._last + raw[at : at + 8 * size])
            found.append(self._last)
        return b"".join(found)


def digest(key: bytes, what: bytes) -> bytes:
    """Return a keyed digest of DIGEST_BYTES bytes."""
    return hashlib.blake2b(what, key=key, digest_size=DIGEST_BYTES).digest()
