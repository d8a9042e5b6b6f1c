"""Map pages in a further rank's memory from the first rank, by messages to its process.

Implements `Vm`; `GroupMachine` joins one per further rank with its own into a `GroupVm`.
"""

from __future__ import annotations

from collections.abc import Sequence

from ballast.core.actions import Short
from ballast.core.errors import BrokenPromise, DeviceError
from ballast.core.units import ceil_div
from ballast.memory.vm import Exported, Latch, Range, WithoutHost, window_pages
from ballast.transport.tensor_parallel.rank_connections import RankConnection
from ballast.transport.tensor_parallel.rank_messages import (
    DiscardPagesMsg,
    FindWindowMsg,
    InspectMappingsMsg,
    MapPagesMsg,
    MappingsReply,
    PagesShortReply,
    PopulatePagesMsg,
    RangeReservedReply,
    ReleaseRangeMsg,
    ReserveRangeMsg,
    UnmapPagesMsg,
)


class RemoteVm(WithoutHost):
    """Implements `Vm` for a further rank, by messages; a rank lends no pages and borrows none."""

    def __init__(self, memory: RankConnection, page_bytes: int, n_pages: int) -> None:
        self.page_bytes, self.n_pages = page_bytes, n_pages
        self._memory = memory
        reply = memory.call(FindWindowMsg())
        assert isinstance(reply, RangeReservedReply)
        self.window = Range(reply.base, window_pages(n_pages), page_bytes)

    def reserve(self, n_bytes: int) -> Range:
        reply = self._memory.call(ReserveRangeMsg(n_bytes))
        assert isinstance(reply, RangeReservedReply)
        return Range(reply.base, ceil_div(n_bytes, self.page_bytes), self.page_bytes)

    def release(self, range: Range) -> None:
        self._memory.call(ReleaseRangeMsg(range.base))

    def map(
        self,
        range: Range,
        at: int,
        pages: Sequence[int],
        *,
        alias: bool = False,
        prefault: bool = False,
    ) -> None:
        self._memory.call(MapPagesMsg(range.base, at, list(pages), alias, prefault))

    def unmap(self, range: Range, at: int, n: int) -> None:
        self._memory.call(UnmapPagesMsg(range.base, at, n))

    def populate(self, pages: Sequence[int]) -> Short | None:
        reply = self._memory.call(PopulatePagesMsg(list(pages)))
        return Short(reply.pages) if isinstance(reply, PagesShortReply) else None

    def discard(self, pages: Sequence[int]) -> None:
        self._memory.call(DiscardPagesMsg(list(pages)))

    def os_pages(self, range: Range) -> dict[int, int]:
        reply = self._memory.call(InspectMappingsMsg(range.base))
        assert isinstance(reply, MappingsReply)
        return reply.mapped

    def fence(self) -> Latch:
        """Return a latch that is done: a command has been carried out when its reply comes."""
        return Latch(done=True)

    def attach(self, exported: Exported) -> int:
        raise DeviceError("attach", "a rank borrows no pages")

    def detach(self, first: int) -> None:
        raise BrokenPromise(f"no device is attached at {first}")

    def enter(self, pages: Sequence[int]) -> None:
        raise BrokenPromise(f"{len(pages)} pages of no device enter the window")

    def leave(self, pages: Sequence[int]) -> None:
        raise BrokenPromise(f"{len(pages)} pages of no device leave the window")

    def prefault(self, pages: Sequence[int]) -> None:
        """Do nothing: a message takes as long as the faults."""

    def forget(self, pages: Sequence[int]) -> None:
        raise BrokenPromise(f"{len(pages)} pages of no device are forgotten")

    def export(self, pages: Sequence[int]) -> Exported:
        raise DeviceError("export", "a rank lends no pages")

    def close(self) -> None:
        """Nothing: the memory ends with the rank's process."""
