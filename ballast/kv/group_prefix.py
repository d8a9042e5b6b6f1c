"""Index cached blocks of models whose layers are in groups (`ballast.kv.windows`).

A block's name is that of its step, and its group's number. A prefix is known as far as each group
has the blocks that its window reaches from there: those before need not be kept.
"""

from __future__ import annotations

from collections.abc import Sequence

from ballast.core.errors import BrokenPromise
from ballast.core.model import ModelSpec
from ballast.kv.prefix import NamedBlock, PrefixIndex
from ballast.kv.windows import GONE, first_step

_DIGEST = 32
"""Bytes of a step's name."""


class GroupPrefixIndex(PrefixIndex):
    """Tables of steps, as `ballast.kv.windows` describes them. Names are of no use elsewhere: none
    is stored in tiers."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec.fingerprint, spec.block_tokens)
        self._spec = spec
        self._suffixes = [bytes([group]) for group in range(spec.kv_groups)]

    def find(self, tokens: Sequence[int], salt: str) -> list[int]:
        """Return the table of the longest known prefix of `tokens`, never with the last one."""
        if not self._kept:
            return []
        spec, steps = self._spec, list[list[int]]()
        since = [0] * spec.kv_groups
        """The first of each group's kept blocks without a gap up to here."""
        name, whole = self._root(salt), 0
        for at in range((len(tokens) - 1) // self.block_tokens):
            name = self._next(name, tokens, at)
            steps.append([self._kept.get(name + suffix, GONE) for suffix in self._suffixes])
            since = [at + 1 if b == GONE else s for b, s in zip(steps[at], since, strict=True)]
            reached = (at + 1) * self.block_tokens
            if any(w is None and s for w, s in zip(spec.kv_windows, since, strict=True)):
                break
            firsts = (first_step(spec, w, reached) for w in spec.kv_windows)
            if all(s <= first for s, first in zip(since, firsts, strict=True)):
                whole = at + 1
        firsts_of = [first_step(spec, w, whole * self.block_tokens) for w in spec.kv_windows]
        return [
            block if at >= first else GONE
            for at, step in enumerate(steps[:whole])
            for block, first in zip(step, firsts_of, strict=True)
        ]

    def chain(self, tokens: Sequence[int], salt: str) -> list[bytes]:
        return []

    def name(
        self,
        tokens: Sequence[int],
        blocks: Sequence[int],
        full: int,
        salt: str,
        tenant: str = "",
    ) -> list[NamedBlock]:
        """Name the blocks of the first `full` steps that have no name yet; returns none."""
        groups, names = self._spec.kv_groups, self._names
        if not 0 <= full * groups <= len(blocks) or full * self.block_tokens > len(tokens):
            raise BrokenPromise(f"{full} full steps of {len(blocks)} for {len(tokens)} tokens")
        at = full
        while at > 0 and blocks[(at - 1) * groups] not in names:
            at -= 1
        if at == full:
            return []
        name = names[blocks[(at - 1) * groups]][:_DIGEST] if at else self._root(salt)
        for i in range(at, full):
            name = self._next(name, tokens, i)
            step = blocks[i * groups : (i + 1) * groups]
            for suffix, block in zip(self._suffixes, step, strict=True):
                if block == GONE:
                    continue
                names[block] = own = name + suffix
                self._kept.setdefault(own, block)
                if own in self._lost:
                    del self._lost[own]
                    self.missed += 1
                if tenant:
                    self._tenants[block] = tenant
        return []


def prefixes_of(spec: ModelSpec) -> PrefixIndex:
    """Return an empty index of a model's blocks."""
    if spec.kv_windows:
        return GroupPrefixIndex(spec)
    return PrefixIndex(spec.fingerprint, spec.block_tokens)
