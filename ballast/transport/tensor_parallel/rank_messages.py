"""Define the messages between the first rank of a tensor-parallel group and each of the others.

The first rank sends commands, one at a time per connection, each answered by one reply, in order.
Further ranks send events on a connection of their own. Addresses in messages are virtual addresses
of the further rank that receives or sends them; they differ from rank to rank.
"""

from __future__ import annotations

import msgspec

from ballast.core.event import TransferDoneEvent
from ballast.core.job import SequenceWork
from ballast.core.link import LinkRates
from ballast.core.rotation import Rotation
from ballast.core.settings import DeviceSettings, ModelSettings


class _RankMessage(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A message that carries the name of its class."""


# -- to a rank ----------------------------------------------------------------------------------


class JoinGroupMsg(_RankMessage, frozen=True):
    """First message: join the group as `rank`; `device`: the rank's part of the settings."""

    rank: int
    device: DeviceSettings
    pace: LinkRates | None


class MeetRanksMsg(_RankMessage, frozen=True):
    """Second message: meet the other ranks, for collectives. Answered when all have met."""

    meeting: str | None
    """Path of the rendezvous file; None: shared memory, whose descriptor follows."""


class FindWindowMsg(_RankMessage, frozen=True):
    """Find the window of the rank's memory. Answered by `RangeReservedReply`."""


class ReserveRangeMsg(_RankMessage, frozen=True):
    """Reserve a range of addresses. Answered by `RangeReservedReply`."""

    n_bytes: int


class ReleaseRangeMsg(_RankMessage, frozen=True):
    """Release a range of addresses."""

    base: int


class MapPagesMsg(_RankMessage, frozen=True):
    """Map pages in a range, from its page `at` on."""

    base: int
    at: int
    pages: list[int]
    alias: bool
    prefault: bool


class UnmapPagesMsg(_RankMessage, frozen=True):
    """Unmap `n` pages of a range, from its page `at` on."""

    base: int
    at: int
    n: int


class PopulatePagesMsg(_RankMessage, frozen=True):
    """Give pages physical memory. Answered by `PagesShortReply` if there is too little."""

    pages: list[int]


class DiscardPagesMsg(_RankMessage, frozen=True):
    """Return the physical memory of pages to the operating system."""

    pages: list[int]


class InspectMappingsMsg(_RankMessage, frozen=True):
    """Report the pages mapped in a range. Answered by `MappingsReply`."""

    base: int
    """Base of the range."""


class CopyMsg(_RankMessage, frozen=True):
    """Copy within the rank's memory; answered when it is done."""

    dst: int
    src: int
    n_bytes: int


class StartTransferMsg(_RankMessage, frozen=True):
    """Start the rank's part of a transfer to the device; its end is a `TransferLandedEvent`."""

    transfer_id: int
    copies: list[tuple[int, int, int]]
    """(target, source, bytes) of each copy."""
    stream: str


class LoadModelMsg(_RankMessage, frozen=True):
    """Load the rank's part of a checkpoint. Answered by `ModelLoadedReply`."""

    settings: ModelSettings
    threads: int


class UnloadModelMsg(_RankMessage, frozen=True):
    """Drop a model and its part of the checkpoint."""

    model: str


class ServeModelMsg(_RankMessage, frozen=True):
    """Make a loaded model ready to run jobs."""

    model: str
    segments: tuple[int, ...]
    """Addresses on the device of its segments, while it is resident."""
    kv_base: int
    """Base of the range or window of its KV cache."""


class SetActivationLimitMsg(_RankMessage, frozen=True):
    """Limit the memory that activations keep between jobs, from the next job on."""

    n_bytes: int


class RunJobMsg(_RankMessage, frozen=True):
    """Run the rank's part of a job; answered when it has ended."""

    model: str
    work: tuple[SequenceWork, ...]
    head: bool


class RemapLayersMsg(_RankMessage, frozen=True):
    """Change which layers rotate, as `WeightStream.remap`; their pages are mapped."""

    model: str
    rotation: Rotation
    held: tuple[int, ...]
    missing: tuple[int, ...]


class SettleLayersMsg(_RankMessage, frozen=True):
    """End the loads of a model's layers, as `WeightStream.settle`.

    A `LayersSettledEvent` follows when none is in transfer.
    """

    model: str


class ForgetLayersMsg(_RankMessage, frozen=True):
    """Forget what the slots hold, as `WeightStream.forget`."""

    model: str


MemoryCommand = (
    FindWindowMsg
    | ReserveRangeMsg
    | ReleaseRangeMsg
    | MapPagesMsg
    | UnmapPagesMsg
    | PopulatePagesMsg
    | DiscardPagesMsg
    | InspectMappingsMsg
    | CopyMsg
    | StartTransferMsg
)

ToRank = (
    JoinGroupMsg
    | MeetRanksMsg
    | MemoryCommand
    | LoadModelMsg
    | UnloadModelMsg
    | ServeModelMsg
    | SetActivationLimitMsg
    | RunJobMsg
    | RemapLayersMsg
    | SettleLayersMsg
    | ForgetLayersMsg
)

# -- from a rank --------------------------------------------------------------------------------


class DoneReply(_RankMessage, frozen=True):
    """Reply: the command was carried out."""


class RangeReservedReply(_RankMessage, frozen=True):
    """Reply: the range is reserved, at an address of the rank."""

    base: int


class PagesShortReply(_RankMessage, frozen=True):
    """Reply: `pages` pages got no physical memory, since the machine has none left."""

    pages: int


class MappingsReply(_RankMessage, frozen=True):
    """Reply: the rank's mappings, as the operating system reports them."""

    mapped: dict[int, int]
    """Page of the device, by page of the range."""


class ModelLoadedReply(_RankMessage, frozen=True):
    """Reply: the model is loaded."""

    addresses: tuple[int, ...]
    """Addresses of the segments in the rank's host tier."""


class RefusedReply(_RankMessage, frozen=True):
    """Reply: the command was not carried out, and nothing has changed."""

    call: str | None
    """The call that failed (`DeviceError.call`); None: a violated invariant (`BrokenPromise`)."""
    reason: str


class TransferLandedEvent(_RankMessage, frozen=True):
    """Event: the rank's part of a transfer has ended."""

    done: TransferDoneEvent


class LayersSettledEvent(_RankMessage, frozen=True):
    """Event: no layer of a model is in transfer on this rank any more."""

    model: str
    held: tuple[int, ...]
    """Layer in each slot, or -1."""


RankReply = (
    DoneReply
    | RangeReservedReply
    | PagesShortReply
    | MappingsReply
    | ModelLoadedReply
    | RefusedReply
)

RankEvent = TransferLandedEvent | LayersSettledEvent
