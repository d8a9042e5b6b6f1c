"""Keep KV in tiers below the device: store blocks when they fill, fetch them for new requests.

Part of `DeviceState`; the bytes are moved by a `KvTierCopies`.

::

    request arrives, or was preempted    look_up ──> KvFoundEvent: which blocks are in which tier
    request is admitted                  fetch ────> KvFetchedEvent: it computes the rest
                                         (after a look-up, if what the device had has gone)
                                         store       what the device has and no tier has any more
    a block has filled                   store       behind the step; nothing waits for it
    a block is forgotten                 void        what was being stored of it does not count

A request that is being fetched runs, with its blocks, but is in no job. Whatever takes its blocks
(preemption, cancellation, eviction) first stops the fetch. Stores hold nothing: a copy counts only
if its block was not forgotten before it ended, so pages change hands as they did before.

So what leaves the device has a copy below, unless a tier had room for none. Prefixes that requests
find on the device are looked up all the same: those in use there stay in the tiers, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ballast.core.kv_tiers import KvFetchedEvent, KvFoundEvent
from ballast.core.request import Request
from ballast.engine.model import ModelState
from ballast.kv import extents
from ballast.kv.directory import MISSING, Tier
from ballast.kv.prefix import NamedBlock
from ballast.kv.tier_shelf import KvBlock
from ballast.policy.kv_fetching import is_worth_fetching

TIER_OF = {tier.value[0]: tier for tier in Tier}
"""Tier by its letter in the answer to a look-up."""


@dataclass(frozen=True, slots=True)
class BlockToStore:
    """A block of this device that has filled."""

    block: int
    address: int
    of: KvBlock
    borrowed: bool = False
    """Whether it lies on a borrowed page: no copy may read it once it has been voided."""


class KvTierCopies(Protocol):
    """Moves KV between a device and the tiers below it. Implemented by `live.kv_tiers`, and by the
    simulator. No method waits."""

    def look_up(self, request_id: str, attempt: int, model: str, names: Sequence[bytes]) -> None:
        """Find the blocks of a chain; a `KvFoundEvent` will come."""

    def fetch(
        self,
        request_id: str,
        attempt: int,
        model: str,
        names: Sequence[bytes],
        targets: Sequence[tuple[int, int]],
    ) -> None:
        """Copy blocks to `targets`, (address, bytes) of each; a `KvFetchedEvent` will come."""

    def stop(self, request_id: str) -> None:
        """Stop a fetch: nothing of it is written after this returns, and no event comes."""

    def store(self, owner: str, blocks: Sequence[BlockToStore]) -> None:
        """Copy blocks of a model `owner` to the tiers, as far as these take them."""

    def void(self, owner: str, block: int) -> None:
        """Note that a block's contents are gone: copies of it that have not ended do not count, and
        none reads it after this returns if it lies on a borrowed page."""

    def occupy(self, n_bytes: int) -> None:
        """Have so many bytes of the host's part be this device's staged blocks: others make way."""

    def close(self) -> None:
        """Stop all copies before this returns."""


@dataclass(slots=True)
class _Prefix:
    """What is known of the KV of a request that is not in a batch, or is being fetched."""

    attempt: int
    model: str
    names: list[bytes]
    tiers: str | None = None
    """Answer of the look-up; None: it has not come."""
    admitted: bool = False
    """Whether the request was admitted before its look-up: it runs, but is in no job."""
    is_here: bool = False
    """Whether the device has all of it: nothing waits for the answer, which says what to store."""
    start: int = 0
    n: int = 0
    """First block, and number of blocks, that are being fetched; 0: none."""


class KvTiers:
    """Look-ups, fetches and stores of one device. Used by the loop's thread only."""

    def __init__(self, bytes_per_second: Callable[[], float]) -> None:
        """`bytes_per_second`: rate of the link to the device."""
        self.copies: KvTierCopies | None = None
        """Moves the bytes; None: there are no tiers."""
        self.fetched_tokens: Counter[Tier] = Counter()
        """Tokens whose KV was fetched, by tier, since start."""
        self.fetches = self.failed = 0
        """Fetches that have ended, and of these, those that brought less than they should have."""
        self._rate = bytes_per_second
        self._open: dict[str, _Prefix] = {}
        self._attempts = 0
        """Number of the last look-up."""
        self._used_here = 0
        """Number of the last look-up of a prefix that the device has, below zero."""
        self._staged_bytes = 0

    @property
    def bytes_per_second(self) -> float:
        """Rate of fetches; 0: there are no tiers."""
        return 0.0 if self.copies is None else self._rate()

    @property
    def awaiting(self) -> bool:
        """Whether the end of a look-up or fetch will come."""
        return any((of.tiers is None and not of.is_here) or of.n for of in self._open.values())

    def watch(self, m: ModelState) -> None:
        """Note what becomes of a model's blocks from now on."""
        m.tiers = self

        def forgotten(block: int) -> None:
            if self.copies is not None:
                self.copies.void(m.spec.name, block)

        m.kv.prefixes.when_forgotten(forgotten)

    def count_staged(self, models: Iterable[ModelState]) -> None:
        """Have the models' staged blocks, in host memory too, count in its tier's bytes."""
        if self.copies is None:
            return
        n_bytes = sum(len(m.kv.staged) * m.spec.block_bytes for m in models)
        if n_bytes != self._staged_bytes:
            self._staged_bytes = n_bytes
            self.copies.occupy(n_bytes)

    # -- look-ups ---------------------------------------------------------------------------------

    def look_up(self, m: ModelState, r: Request) -> None:
        """Begin to look for a waiting request's prefix, unless the device has all of it."""
        self._open.pop(r.id, None)
        names = self._names(m, r)
        if names and len(m.kv.prefixes.find(*r.prefix)) < len(names):
            self._ask(m, r, names)

    def found(self, m: ModelState, r: Request, event: KvFoundEvent) -> None:
        """Take the answer of a look-up."""
        here = self._open.get(r.id)
        if here is None or here.attempt != event.attempt or here.n:
            return
        here.tiers = event.tiers
        if here.admitted:
            m.running.end_fetch(r)
            self.fetch(m, r)
        elif here.is_here:
            del self._open[r.id]
            self._store_lost(m, r, here)

    def is_searching(self, r: Request) -> bool:
        """Return whether the answer to a request's look-up has yet to come."""
        here = self._open.get(r.id)
        return here is not None and here.tiers is None

    def forget(self, r: Request) -> None:
        """Forget a request that has ended."""
        self.stop(r)
        self._open.pop(r.id, None)

    # -- fetches ----------------------------------------------------------------------------------

    def fetch(self, m: ModelState, r: Request) -> None:
        """Begin to fetch blocks of a request that was just admitted, if there are any and that
        takes less time than to compute them; to look for them first, if that was left out since the
        device had what it has no longer. Stores what it has and the tiers have lost."""
        here = self._open.pop(r.id, None)
        size = m.spec.block_tokens
        start = r.computed // size
        if here is None and (names := self._names(m, r)):
            asked = self._ask(m, r, names, is_here=start >= len(names))
            if not asked.is_here:
                asked.admitted = True
                m.running.begin_fetch(r)
        if here is None or here.tiers is None or self.copies is None:
            return
        self._store_lost(m, r, here)
        there = here.tiers[start:].partition(MISSING)[0]
        blocks = r.blocks[start : start + len(there)]
        # Up to the first on a borrowed page, for which its lender may ask at any time.
        borrowed = m.kv.borrowed.among(blocks)
        n = blocks.index(borrowed[0]) if borrowed else len(blocks)
        there, blocks = there[:n], blocks[:n]
        n_bytes = n * m.spec.block_bytes
        total, rate = len(r.tokens), self._rate()
        if not n:
            return
        on_disk = there.count(Tier.DISK.value[0]) * m.spec.block_bytes
        if not is_worth_fetching(
            m.costs, r.computed, n * size, total, n_bytes, rate, disk_bytes=on_disk
        ):
            return
        here.start, here.n = start, n
        self._open[r.id] = here
        m.running.begin_fetch(r)
        names = here.names[start : start + n]
        targets = [(m.kv.block_address(b), m.spec.block_bytes) for b in blocks]
        self.copies.fetch(r.id, here.attempt, here.model, names, targets)

    def fetched(self, m: ModelState, r: Request, event: KvFetchedEvent) -> None:
        """End a fetch: the request computes what it has not brought."""
        here = self._open.get(r.id)
        if here is None or here.attempt != event.attempt or not here.n:
            return
        del self._open[r.id]
        m.running.end_fetch(r)
        size, came = m.spec.block_tokens, min(event.blocks, here.n)
        self.fetches += 1
        self.failed += came < here.n
        if not came:
            return
        assert here.tiers is not None
        letters = Counter(here.tiers[here.start : here.start + came])
        fetched = {tier: letters[a] * size for a, tier in TIER_OF.items() if letters[a]}
        self.fetched_tokens.update(fetched)
        if r.cached_tokens == r.computed and not r.generated:
            r.cached_tokens += came * size
            r.fetched += tuple((tier.value, n) for tier, n in fetched.items())
        m.running.compute(r, (here.start + came) * size)
        m.kv.prefixes.hit_tokens += came * size
        m.kv.remember(r.tokens, r.blocks, r.computed, r.salt, r.submission.tenant)

    def stop(self, r: Request) -> None:
        """Stop the fetch of a request, whose blocks are about to be freed."""
        here = self._open.get(r.id)
        if here is not None and (here.n or here.admitted):
            del self._open[r.id]
            if self.copies is not None and here.n:
                self.copies.stop(r.id)

    # -- stores -----------------------------------------------------------------------------------

    def store(self, m: ModelState, r: Request, named: Iterable[NamedBlock]) -> None:
        """Store blocks of a request that have filled, if fetching them can ever pay."""
        if self.copies is None or not m.kv.in_window:
            return
        model, size = _key(m, r), m.spec.block_tokens
        costs, n_bytes, tenant = m.costs, m.spec.block_bytes, r.submission.tenant
        blocks = []
        for block, name, parent, at in named:
            if block < 0:
                continue  # it is staged
            # A chain is fetched as one, so that its overhead does not count here.
            end = (at + 1) * size
            if is_worth_fetching(costs, at * size, size, end, n_bytes, self._rate(), 0.0):
                seconds = costs.per_token * size
                of = KvBlock(name, parent, n_bytes, model, tenant, seconds)
                borrowed = bool(m.kv.borrowed.among([block]))
                blocks.append(BlockToStore(block, m.kv.block_address(block), of, borrowed))
        if blocks:
            self.copies.store(m.spec.name, blocks)

    # -- inside -----------------------------------------------------------------------------------

    def _names(self, m: ModelState, r: Request) -> list[bytes]:
        """Return the names of a request's prefix in the tiers; empty: it is not looked for."""
        if self.copies is None or r.streams or not m.kv.in_window:
            return []
        return m.kv.prefixes.names(*r.prefix)

    def _ask(
        self, m: ModelState, r: Request, names: list[bytes], *, is_here: bool = False
    ) -> _Prefix:
        """Begin to look for a request's prefix."""
        assert self.copies is not None, "there are names to look for"
        # Numbers of their own: stories recorded before these look-ups were made still replay.
        self._attempts += not is_here
        self._used_here -= is_here
        attempt = self._used_here if is_here else self._attempts
        model = _key(m, r)
        self._open[r.id] = asked = _Prefix(attempt, model, names, is_here=is_here)
        self.copies.look_up(r.id, attempt, model, names)
        return asked

    def _store_lost(self, m: ModelState, r: Request, here: _Prefix) -> None:
        """Store blocks of a running request that the device has, and that no tier has any more."""
        assert here.tiers is not None
        n = min(len(here.names), r.computed // m.spec.block_tokens)
        tiers, names = here.tiers.ljust(n, MISSING), here.names
        lost = [
            NamedBlock(r.blocks[at], names[at], names[at - 1] if at else b"", at)
            for at in range(n)
            if tiers[at] == MISSING and m.kv.prefixes.name_of(r.blocks[at]) == names[at]
        ]
        if lost:
            self.store(m, r, lost)


def _key(m: ModelState, r: Request) -> str:
    """Return what blocks of a request's model and adapter are filed under."""
    adapter = "" if r.adapter is None else m.spec.adapters[r.adapter].fingerprint
    return f"{extents.form(m.kv)}:{adapter}"
