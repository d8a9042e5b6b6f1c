"""List which tiers below the device have copies of which KV blocks, and decide which copies go.

Used by the host store, live and in virtual time. Pure: reads and writes no bytes. The device's own
part is the prefix cache's index (`kv.prefix`), which names blocks in the same way.

::

    device ── demote, land ──> host ── demote, land ──> disk        a copy is listed when it landed
           <──── promote ─────      <───── stage ──────             drop, scrub: in all tiers

Full blocks never change and names say what is in them, so copies are made without locks and are all
equal; which of them exists is a hint, and what a copy holds is checked by its checksum.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from ballast.core.errors import BrokenPromise
from ballast.kv.tier_shelf import KvBlock, TierShelf


class Tier(StrEnum):
    """Where a copy of a block is. Fastest first; the value's first letter stands for it in the
    answer to a look-up."""

    HOST = "host"
    DISK = "disk"


MISSING = "-"
"""Stands for a block without a copy in the answer to a look-up."""


@dataclass(frozen=True, slots=True)
class TierSettings:
    """Capacity and speed of one tier."""

    capacity: int
    """Bytes."""
    bytes_per_second: float | None = None
    """Rate at which copies in it are fetched; None: always faster than computing."""
    unit: int = 1
    """Bytes of which a block takes whole multiples."""


@dataclass(frozen=True, slots=True)
class Demotion:
    """Result of asking a tier to take a block."""

    room: bool
    """Whether the block may be copied there now; `land` or `drop` must follow."""
    gone: tuple[KvBlock, ...] = ()
    """Blocks that made way in that tier; they are not listed there any more."""


@dataclass(slots=True)
class _Listed:
    block: KvBlock
    checksums: dict[Tier, int | None]
    """By tier; None: the copy has not landed."""


class BlockDirectory:
    """Copies of KV blocks in tiers of bounded size."""

    def __init__(self, tiers: dict[Tier, TierSettings]) -> None:
        self._settings = tiers
        self.shelves = {tier: TierShelf(of.capacity, of.unit) for tier, of in tiers.items()}
        self._listed: dict[bytes, _Listed] = {}

    def __len__(self) -> int:
        """Number of distinct blocks, those that have not landed included."""
        return len(self._listed)

    def __contains__(self, name: bytes) -> bool:
        return name in self._listed

    def block(self, name: bytes) -> KvBlock:
        return self._listed[name].block

    def has(self, name: bytes, tier: Tier) -> bool:
        """Return whether a copy has landed in a tier."""
        return self.checksum(name, tier) is not None

    def checksum(self, name: bytes, tier: Tier) -> int | None:
        """Return the checksum of a copy that has landed; None: there is none."""
        listed = self._listed.get(name)
        return None if listed is None else listed.checksums.get(tier)

    # -- the verbs --------------------------------------------------------------------------------

    def look_up(self, model: str, names: Sequence[bytes]) -> str:
        """Return a letter for each block of a chain, of its fastest tier or `MISSING`, without
        those missing at the end. It counts as a use of the blocks found."""
        found = [self._fastest(model, name) for name in names]
        for shelf in self.shelves.values():
            shelf.touch(names)
        return "".join(MISSING if tier is None else tier.value[0] for tier in found).rstrip(MISSING)

    def demote(self, block: KvBlock, tier: Tier) -> Demotion:
        """Reserve room for a copy of a block in a tier, for which others may make way.

        No room: it has a copy there, or one is on its way; it costs less to compute than to fetch;
        or all that could make way is in use."""
        listed = self._listed.get(block.name)
        if tier not in self.shelves or not self._is_worth(block, tier):
            return Demotion(False)
        added, names = self.shelves[tier].add(block)
        gone = tuple(self._unlist(name, tier) for name in names)
        if not added:
            return Demotion(False, gone)
        if listed is None:
            listed = self._listed[block.name] = _Listed(block, {})
        listed.checksums[tier] = None
        return Demotion(True, gone)

    def land(self, name: bytes, tier: Tier, checksum: int) -> None:
        """List a copy, for which room was reserved, as it has been written. Does nothing if it was
        dropped meanwhile."""
        listed = self._listed.get(name)
        if listed is None or tier not in listed.checksums:
            return
        if listed.checksums[tier] is not None:
            raise BrokenPromise("a copy of a KV block has landed twice")
        listed.checksums[tier] = checksum
        self.shelves[tier].unpin(name)

    def promote(self, model: str, names: Sequence[bytes], tier: Tier) -> list[tuple[bytes, int]]:
        """Pin the copies of a chain's beginning in a tier, so that they stay while they are copied
        to a faster one; return their names and checksums. `unpin` must follow for each."""
        pinned: list[tuple[bytes, int]] = []
        for name in names:
            checksum = self.checksum(name, tier)
            if checksum is None or self._listed[name].block.model != model:
                break
            self.shelves[tier].pin(name)
            pinned.append((name, checksum))
        return pinned

    def unpin(self, name: bytes, tier: Tier) -> None:
        """End a use that `promote` began."""
        self.shelves[tier].unpin(name)

    def stage(self, model: str, names: Iterable[bytes], source: Tier) -> Iterator[KvBlock]:
        """Yield the blocks of a chain that have a copy in `source` and none in a faster tier, up to
        the first that has none at all: what has to be brought for the chain to be promoted."""
        for name in names:
            tier = self._fastest(model, name)
            if tier is None:
                return
            if tier is source:
                yield self._listed[name].block

    def drop(self, name: bytes, tier: Tier) -> bool:
        """Remove a copy, landed or not: its bytes are wrong, or were not written. Returns whether
        it was listed or expected."""
        if tier not in self.shelves or not self.shelves[tier].drop(name):
            return False
        self._unlist(name, tier)
        return True

    def scrub(self, *, model: str | None = None, tenant: str | None = None) -> list[KvBlock]:
        """Remove all copies of a model's or a tenant's blocks, or of both together; return them.

        `model`: the fingerprint of a model or adapter."""
        found = [
            listed.block
            for listed in self._listed.values()
            if (model is None or model in listed.block.model.split(":"))
            and (tenant is None or listed.block.tenant == tenant)
        ]
        for block in found:
            for tier in self.shelves:
                self.drop(block.name, tier)
        return found

    def models(self) -> set[str]:
        """Return the fingerprints of the models and adapters whose blocks are listed."""
        parts = (listed.block.model.split(":") for listed in self._listed.values())
        return {one for of in parts for one in (of[0], of[-1]) if one}

    def resize(self, tier: Tier, capacity: int) -> tuple[KvBlock, ...]:
        """Change a tier's capacity; return the blocks that made way."""
        return tuple(self._unlist(name, tier) for name in self.shelves[tier].resize(capacity))

    def validate(self) -> None:
        """Raises BrokenPromise unless lists and shelves agree."""
        for tier, shelf in self.shelves.items():
            shelf.validate()
            if set(shelf) != {n for n, of in self._listed.items() if tier in of.checksums}:
                raise BrokenPromise(f"the directory's {tier} tier lists what is not there")
        if not all(listed.checksums for listed in self._listed.values()):
            raise BrokenPromise("the directory lists a block without a copy")

    # -- inside -----------------------------------------------------------------------------------

    def _fastest(self, model: str, name: bytes) -> Tier | None:
        """Return the fastest tier with a copy that has landed."""
        listed = self._listed.get(name)
        if listed is None or listed.block.model != model:
            return None
        return next((t for t in self.shelves if listed.checksums.get(t) is not None), None)

    def _is_worth(self, block: KvBlock, tier: Tier) -> bool:
        """Return whether fetching a block from a tier takes less time than computing it again."""
        rate = self._settings[tier].bytes_per_second
        return rate is None or not block.seconds or block.n_bytes / rate < block.seconds

    def _unlist(self, name: bytes, tier: Tier) -> KvBlock:
        listed = self._listed[name]
        del listed.checksums[tier]
        if not listed.checksums:
            del self._listed[name]
        return listed.block
