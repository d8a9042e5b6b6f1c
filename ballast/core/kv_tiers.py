"""Define the settings of KV tiers below the device, and the events of their look-ups and fetches.

Events are posted to the loop's inbox by `live.kv_tiers`, or by the simulator's, and handled by
`engine.kv_tiers`.
"""

from __future__ import annotations

from dataclasses import dataclass

DISK_BYTES_PER_SECOND = 1e9
"""Rate at which a disk is expected to be read."""
PEER = "peer"
"""Names memory borrowed from other devices, where cached tokens are counted by tier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvTierSettings:
    """Settings of the tiers in which a host keeps KV that has left its devices."""

    host_bytes: int = 0
    """Bytes of host memory, for all devices together; 0: no KV is kept there."""
    disk_path: str = ""
    """Directory of the disk tier, whose KV outlives the server; empty: no disk tier."""
    disk_bytes: int = 0
    """Bound of the disk tier, in bytes; 0: no disk tier."""


@dataclass(frozen=True, slots=True)
class KvFoundEvent:
    """A look-up of a request's prefix has ended."""

    request_id: str
    attempt: int
    tiers: str = ""
    """A letter for each full block from the prompt's first on, as `BlockDirectory.look_up` returns
    them; empty: none was found, or the look-up failed."""


@dataclass(frozen=True, slots=True)
class KvFetchedEvent:
    """A fetch of a request's prefix into its blocks has ended."""

    request_id: str
    attempt: int
    blocks: int
    """Number of blocks, from the first of the fetch, that have been fetched; the others are
    computed."""
