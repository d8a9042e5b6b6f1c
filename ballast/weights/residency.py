"""The weights of one model on one device: whether they are there, and where.

All segments lie in one range of addresses, each beginning at a page, in load order::

    segment     |    0: embeddings    |  1: layer 0   |  2: layer 1   | ...
    pages       |  0  |  1  |  2  |  3  |  4  |  5  |  6  |  7  |  8  | ...

Parameters are views on these addresses for as long as the model exists; whether pages lie beneath
is what changes. Weights are read only: eviction copies nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ballast.core.actions import Short
from ballast.core.errors import BrokenPromise
from ballast.core.model import ModelSpec
from ballast.core.units import ceil_div
from ballast.memory.pool import Pool
from ballast.memory.range import BackedRange
from ballast.memory.transfer import Copy, Link
from ballast.memory.vm import Vm


@dataclass(frozen=True, slots=True)
class Segment:
    """Where one segment lies."""

    at: int
    """First page in the model's range."""
    n_pages: int
    n_bytes: int
    address: int
    """On the device; begins at a page."""
    host_address: int
    """In the host tier, where its bytes stay."""

    @property
    def copy(self) -> Copy:
        """From the host tier to the device."""
        return Copy(self.address, self.host_address, self.n_bytes)


class WeightsOnDevice:
    """All segments of a model, present together or absent together. Owner ``weights:NAME``."""

    def __init__(
        self, spec: ModelSpec, pool: Pool, vm: Vm, link: Link, host_addresses: Sequence[int]
    ) -> None:
        """`host_addresses`: of each segment, in the order of `spec.segment_bytes`."""
        if len(host_addresses) != len(spec.segment_bytes):
            raise BrokenPromise(
                f"{spec.name}: {len(spec.segment_bytes)} segments at {len(host_addresses)} "
                "host addresses"
            )
        self.spec = spec
        self.pages = spec.weight_pages(vm.page_bytes)
        """Pages all segments take when they are here, whether they are or not."""
        self._link = link
        self._range = BackedRange(pool, vm, f"weights:{spec.name}", self.pages * vm.page_bytes)
        self.segments = self._table(host_addresses)

    @property
    def owner(self) -> str:
        return self._range.owner

    @property
    def range(self) -> BackedRange:
        return self._range

    @property
    def backed(self) -> bool:
        """Whether pages lie beneath; their contents are valid once the transfer has ended."""
        return self._range.backed > 0

    def segment_address(self, i: int) -> int:
        """Device address of segment `i`; never changes."""
        return self.segments[i].address

    def activate(self, transfer_id: int) -> Short | None:
        """Back all segments and start the transfer that fills them; or do nothing.

        `Short.pages` are missing in the pool. If the link refuses, the pages go back and its error
        is raised. The link tells the end as `TransferDone`; nothing may be read before.
        """
        if self.backed:
            raise BrokenPromise(f"{self.spec.name}: its weights are on the device already")
        short = self._range.back(0, self.pages)
        if short is not None:
            return short
        try:
            self._link.start(transfer_id, [segment.copy for segment in self.segments])
        except BaseException:
            self._range.release(0, self.pages)
            raise
        return None

    def evict(self) -> None:
        """All pages go back to the pool. No job and no transfer may use them."""
        if not self.backed:
            raise BrokenPromise(f"{self.spec.name}: its weights are not on the device")
        self._range.release(0, self.pages)

    def close(self) -> None:
        """Evict if need be, and give the addresses back: the model is gone for good."""
        self._range.close()

    def _table(self, host_addresses: Sequence[int]) -> tuple[Segment, ...]:
        page_bytes = self._range.page_bytes
        table: list[Segment] = []
        at = 0
        for n_bytes, host in zip(self.spec.segment_bytes, host_addresses, strict=True):
            n_pages = ceil_div(n_bytes, page_bytes)
            table.append(Segment(at, n_pages, n_bytes, self._range.address(at), host))
            at += n_pages
        return tuple(table)
