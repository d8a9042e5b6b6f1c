"""Which prefixes requests share, told without their tokens: keyed digests of the blocks they fill.

Two chains of one key are equal up to the same block as the sequences are, if model and salt are
equal too. Who does not have the key cannot try tokens out.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

DIGEST_BYTES = 8


class Chain:
    """The blocks of one sequence, which only grows."""

    __slots__ = ("_key", "_last", "_size", "_tail", "tokens")

    def __init__(self, key: bytes, root: str, block_tokens: int) -> None:
        """`key`: up to 64 bytes; `root`: what keeps sequences apart, whatever their tokens."""
        self._key = key
        self._last = digest(key, root.encode())
        self._size = block_tokens
        self._tail: list[int] = []
        """Tokens of the block that is not full."""
        self.tokens = 0
        """In all."""

    def add(self, token: int) -> bytes:
        """One more; the digest of the block that it fills, if any."""
        if len(self._tail) + 1 == self._size:
            return self.push((token,))
        self._tail.append(token)
        self.tokens += 1
        return b""

    def push(self, tokens: Sequence[int]) -> bytes:
        """More tokens; the digests of the blocks that they fill, one after the other."""
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
    """`DIGEST_BYTES` that nobody can make without the key."""
    return hashlib.blake2b(what, key=key, digest_size=DIGEST_BYTES).digest()
