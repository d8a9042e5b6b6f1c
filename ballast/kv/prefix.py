"""Index cached KV blocks by a hash chain of their tokens, for automatic prefix caching.

Used by the KV cache, and by the controller to route requests to devices that cache their prefix.
Names blocks only: it counts no references and frees nothing.

The *name* of a full block is the SHA-256 digest of the name of the block before it and of its own
token ids; the chain starts from the model's fingerprint and a salt. Equal names mean equal KV (but
for the order of floating-point sums), whichever request computed it; different models or salts
never share a name.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ballast.core.errors import BrokenPromise

MOST_LOST = 1 << 15
"""Bound of the blocks that are known to have been lost: a few MiB of names."""


class NamedBlock(NamedTuple):
    """A block that has just got its name."""

    block: int
    name: bytes
    parent: bytes
    """Name of the block before it in the chain; empty: it is the first."""
    at: int
    """Its place in the chain, from 0."""


class PrefixIndex:
    """Names of blocks. A block is *named* if its name is known, and *kept* if `find` can return it.

    Of several blocks with one name the first is kept; the others are private duplicates.
    """

    def __init__(self, fingerprint: str, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._fingerprint = fingerprint.encode()
        self._names: dict[int, bytes] = {}
        self._kept: dict[bytes, int] = {}
        self._tenants: dict[int, str] = {}
        """Tenant of each named block that has one."""
        self.missed = 0
        """Blocks that were lost and have been computed again, since start."""
        self._lost: dict[bytes, None] = {}
        """Names of blocks that were lost, the latest last; `MOST_LOST` at most."""
        self.forgotten: Callable[[int], object] = lambda block: None
        """Called with a named block whose contents are about to go, or to move."""

    def __len__(self) -> int:
        """Number of kept blocks."""
        return len(self._kept)

    def find(self, tokens: Sequence[int], salt: str) -> list[int]:
        """Return the kept blocks of the longest known prefix of `tokens`, in order.

        Whole blocks only, and never the last token: at least one is left to be computed. Costs one
        digest for each block found, and one more.
        """
        found: list[int] = []
        if not self._kept:
            return found
        name = self._root(salt)
        for at in range((len(tokens) - 1) // self.block_tokens):
            name = self._next(name, tokens, at)
            block = self._kept.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def chain(self, tokens: Sequence[int], salt: str) -> list[bytes]:
        """Return the names of the blocks that `find` looks for, whether they are known or not."""
        names: list[bytes] = []
        name = self._root(salt)
        for at in range((len(tokens) - 1) // self.block_tokens):
            name = self._next(name, tokens, at)
            names.append(name)
        return names

    def name(
        self,
        tokens: Sequence[int],
        blocks: Sequence[int],
        full: int,
        salt: str,
        tenant: str = "",
    ) -> list[NamedBlock]:
        """Name those of the first `full` blocks of a table of `tokens` that have no name yet, as
        blocks of `tenant`; return those of them that are kept.

        A table is named from its beginning, always under one salt. Costs one look-up if all have
        names.
        """
        if not 0 <= full <= len(blocks) or full * self.block_tokens > len(tokens):
            raise BrokenPromise(f"{full} full blocks of {len(blocks)} for {len(tokens)} tokens")
        names = self._names
        at = full
        while at > 0 and blocks[at - 1] not in names:
            at -= 1
        named: list[NamedBlock] = []
        if at == full:
            return named
        name = names[blocks[at - 1]] if at else self._root(salt)
        for i in range(at, full):
            parent, name = name if i else b"", self._next(name, tokens, i)
            names[blocks[i]] = name
            if self._kept.setdefault(name, blocks[i]) == blocks[i]:
                if name in self._lost:
                    del self._lost[name]
                    self.missed += 1
                named.append(NamedBlock(blocks[i], name, parent, i))
            if tenant:
                self._tenants[blocks[i]] = tenant
        return named

    def tenant(self, block: int) -> str:
        """Return the tenant that a block was named for; empty: none."""
        return self._tenants.get(block, "")

    def keep(self, block: int) -> bool:
        """Return whether the block is kept; a duplicate whose original is gone becomes kept."""
        name = self._names.get(block)
        return name is not None and self._kept.setdefault(name, block) == block

    def name_of(self, block: int) -> bytes | None:
        """Return a block's name; None: it has none."""
        return self._names.get(block)

    def lose(self, blocks: Iterable[int]) -> None:
        """Note which blocks are about to be forgotten to make room."""
        for block in blocks:
            name = self._names.get(block)
            if name is not None and self._kept.get(name) == block:
                self._lost.pop(name, None)
                self._lost[name] = None
        while len(self._lost) > MOST_LOST:
            del self._lost[next(iter(self._lost))]

    def forget(self, block: int) -> None:
        """Remove a block whose contents are gone."""
        name = self._names.pop(block, None)
        self._tenants.pop(block, None)
        if name is None:
            return
        self.forgotten(block)
        if self._kept.get(name) == block:
            del self._kept[name]

    def move(self, source: int, target: int) -> None:
        """Transfer the name of `source` to `target`, to which its contents have moved."""
        name = self._names.pop(source, None)
        if name is None:
            return
        self.forgotten(source)
        self._names[target] = name
        tenant = self._tenants.pop(source, None)
        if tenant is not None:
            self._tenants[target] = tenant
        if self._kept.get(name) == source:
            self._kept[name] = target

    def validate(self) -> None:
        """Raises BrokenPromise unless every name leads to a block that bears it."""
        if not self._tenants.keys() <= self._names.keys():
            raise BrokenPromise("a block without a name has a tenant")
        for name, block in self._kept.items():
            if self._names.get(block) != name:
                raise BrokenPromise(f"a prefix leads to block {block}, which has another name")

    def named(self) -> set[int]:
        return set(self._names)

    def kept(self) -> set[int]:
        return set(self._kept.values())

    def _root(self, salt: str) -> bytes:
        # The length keeps (fingerprint, salt) apart from other splits of the same characters.
        head = len(self._fingerprint).to_bytes(8, "little") + self._fingerprint
        return hashlib.sha256(head + salt.encode()).digest()

    def _next(self, parent: bytes, tokens: Sequence[int], at: int) -> bytes:
        ids = array("q", tokens[at * self.block_tokens : (at + 1) * self.block_tokens])
        return hashlib.sha256(parent + ids.tobytes()).digest()
