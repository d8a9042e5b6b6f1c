"""Define the messages between a worker and the owner of its host's KV store.

Used by `cluster.kv_broker` and `cluster.kv_client`. Answers have the number of their request.
"""

from __future__ import annotations

import msgspec

from ballast.kv.host_store import Slot
from ballast.memory.cell_book import Runs

MOST_BLOCKS = 256
"""Bound of the blocks in one request, so that it fits the socket's buffer."""
MOST_RUNS = 4096
"""Bound of the runs of cells in one answer, likewise."""
MOST_BYTES = 1 << 17
"""Bound of a message."""


class StoredBlock(msgspec.Struct, array_like=True, frozen=True):
    """A block that a worker would store; fields as of `KvBlock`."""

    name: bytes
    parent: bytes
    n_bytes: int
    tenant: str
    seconds: float


class LookUpMsg(msgspec.Struct, tag="l", frozen=True):
    """Which tiers have these blocks of a chain?"""

    number: int
    model: str
    names: tuple[bytes, ...]


class FetchMsg(msgspec.Struct, tag="f", frozen=True):
    """Where in the host tier are these blocks of a chain? They stay until `ReleaseMsg`."""

    number: int
    model: str
    names: tuple[bytes, ...]


class ReserveMsg(msgspec.Struct, tag="r", frozen=True):
    """Where may these blocks be written? `LandMsg` follows."""

    number: int
    model: str
    blocks: tuple[StoredBlock, ...]


class ReleaseMsg(msgspec.Struct, tag="u", frozen=True):
    """Blocks are not read any more. Has no answer."""

    names: tuple[bytes, ...]
    corrupt: bytes = b""
    """One whose checksum was wrong; empty: none."""


class LandMsg(msgspec.Struct, tag="d", frozen=True):
    """Blocks have been written, or will not be (checksum None). Has no answer."""

    written: tuple[tuple[bytes, int | None], ...]


class StagedMsg(msgspec.Struct, tag="s", frozen=True):
    """The worker's staged blocks take so much host memory now. Has no answer."""

    n_bytes: int


class FoundMsg(msgspec.Struct, tag="L", frozen=True):
    """Answer to `LookUpMsg`."""

    number: int
    tiers: str


class SlotsMsg(msgspec.Struct, tag="F", frozen=True):
    """Answer to `FetchMsg`: blocks from the chain's first on."""

    number: int
    slots: tuple[Slot, ...]
    more: bool = False
    """Whether further blocks did not fit the answer."""


class ReservedMsg(msgspec.Struct, tag="R", frozen=True):
    """Answer to `ReserveMsg`: cells of each block; None, or missing: it is not to be stored."""

    number: int
    cells: tuple[Runs | None, ...]


ToStore = LookUpMsg | FetchMsg | ReserveMsg | ReleaseMsg | LandMsg | StagedMsg
FromStore = FoundMsg | SlotsMsg | ReservedMsg
