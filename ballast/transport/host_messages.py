"""Define the messages between the server and the agent of a host, which keeps workers there.

Exchanged by `HostConnection` in the server and `HostAgent` on the host. Workers' own messages do
not pass the agent: each worker is connected with the server.
"""

from __future__ import annotations

import msgspec

from ballast import __version__
from ballast.core.migration import Piece
from ballast.transport.curve import CurveLink
from ballast.transport.decoding import decode
from ballast.transport.worker_messages.message import WorkerMessage

# -- to the host --------------------------------------------------------------------------------


class ConfigureHostMsg(WorkerMessage, frozen=True):
    """First message."""

    writable: bool
    """Whether shared segments stay writable, as `SegmentBroker`."""
    proof: str = ""
    """File that the server's host has; an agent that can read it returns its content."""
    keep_seconds: float = 0.0
    """Time for which the host keeps devices whose server is gone, for the next one."""


class StartWorkerMsg(WorkerMessage, frozen=True):
    """Start a worker's process, which connects to the server by `keys`, or over the Unix socket in
    `directory`."""

    id: int
    keys: CurveLink | None = None
    directory: str = ""
    spare: bool = False


class AssignWorkerMsg(WorkerMessage, frozen=True):
    """A worker serves a device: it is kept for the next server if this one is gone."""

    id: int
    device: str


class AttachWorkerMsg(WorkerMessage, frozen=True):
    """Have a worker that was kept connect to the server, as in `StartWorkerMsg`."""

    id: int
    keys: CurveLink | None = None
    directory: str = ""


class KillWorkerMsg(WorkerMessage, frozen=True):
    """Kill a worker's process at once."""

    id: int
    why: str


class CloseWorkerMsg(WorkerMessage, frozen=True):
    """End a worker's process, forcibly after `patience` seconds, and free what belongs to it."""

    id: int
    patience: float


class EndHostMsg(WorkerMessage, frozen=True):
    """The server stops: end all workers, and the agent. None is kept."""


class ForgetModelMsg(WorkerMessage, frozen=True):
    """Keep the segments of a model no longer: it has left the fleet."""

    model: str


class SendModelMsg(WorkerMessage, frozen=True):
    """Listen for a host, by its public key, and send it a model that is kept here, or that is still
    coming here."""

    id: int
    model: str
    kind: str
    ip: str
    """Address to listen at: this host's."""
    receiver: str


class ReceiveModelMsg(WorkerMessage, frozen=True):
    """Answer to `WantModelMsg`: receive the model from the host that listens at an address."""

    model: str
    kind: str
    address: str
    sender: str
    """Its public key."""


class ReadFilesMsg(WorkerMessage, frozen=True):
    """Answer to `WantModelMsg`: no other host sends the model."""

    model: str
    kind: str


class OfferKvMsg(WorkerMessage, frozen=True):
    """Let a host read pieces of a device's memory, once."""

    ticket: str
    node: str
    """The host that may read them."""
    address: str
    """Where the device's worker exports its memory."""
    pieces: tuple[Piece, ...]


class ListenKvMsg(WorkerMessage, frozen=True):
    """Listen for a host, by its public key, and send it the KV that it is offered."""

    id: int
    node: str
    ip: str
    """Address to listen at: this host's."""
    receiver: str


class ReachHostMsg(WorkerMessage, frozen=True):
    """Answer to `WantHostMsg`: where the other host listens."""

    node: str
    address: str
    """Empty: it cannot be reached."""
    key: str
    """Its public key."""


# -- to the server ------------------------------------------------------------------------------


class HostHelloMsg(WorkerMessage, frozen=True):
    """The agent is up."""

    hostname: str
    cores: int
    link_memory: str
    """Path of the memory by which devices of this host pace their link, on this host."""
    peer_memory: str
    proof: str = ""
    """Content of the file of `ConfigureHostMsg.proof`; empty: there is no such file here."""
    machine: str = ""
    """Digest of what decides how weights are laid out, beside what models' kinds are made of."""
    workers: tuple[tuple[int, str], ...] = ()
    """Workers that were kept since the last server is gone, each with its device."""
    version: str = __version__


class WorkerEndedMsg(WorkerMessage, frozen=True):
    """A worker's process has ended, or could not be started."""

    id: int
    exit_reason: str
    in_flight: tuple[str, ...] = ()


class HostBeatMsg(WorkerMessage, frozen=True):
    """What each worker's process has used so far: `liveness_watch.Activity` by id."""

    activity: dict[int, tuple[int, int]]


class ModelKeptMsg(WorkerMessage, frozen=True):
    """A model is kept on this host from now on, loaded from files of this `listing`; digests of its
    name and of its kind."""

    model: str
    kind: str
    listing: str


class ModelDroppedMsg(WorkerMessage, frozen=True):
    """A model is kept on this host no longer."""

    model: str
    kind: str


class WantModelMsg(WorkerMessage, frozen=True):
    """A worker of this host is about to load a model; `listing`: of its files here."""

    model: str
    kind: str
    listing: str
    key: str
    """Public key with which this host connects to the one that sends it."""


class SenderReadyMsg(WorkerMessage, frozen=True):
    """This host listens, as ordered by `SendModelMsg`."""

    id: int
    address: str
    key: str


class ModelFailedMsg(WorkerMessage, frozen=True):
    """A model has not come, or not as it was; another host is to send it."""

    model: str
    kind: str
    why: str


class WantHostMsg(WorkerMessage, frozen=True):
    """A worker of this host reads KV of another host."""

    node: str
    key: str
    """Public key with which this host connects."""


class HostListensMsg(WorkerMessage, frozen=True):
    """This host listens, as ordered by `ListenKvMsg`; without an address, it cannot."""

    id: int
    address: str
    key: str


ModelOrder = SendModelMsg | ReceiveModelMsg | ReadFilesMsg
ModelReport = ModelKeptMsg | ModelDroppedMsg | WantModelMsg | SenderReadyMsg | ModelFailedMsg
KvOrder = OfferKvMsg | ListenKvMsg | ReachHostMsg
KvReport = WantHostMsg | HostListensMsg

ToHost = (
    ConfigureHostMsg
    | StartWorkerMsg
    | AssignWorkerMsg
    | AttachWorkerMsg
    | KillWorkerMsg
    | CloseWorkerMsg
    | EndHostMsg
    | ForgetModelMsg
    | ModelOrder
    | KvOrder
)
FromHost = HostHelloMsg | WorkerEndedMsg | HostBeatMsg | ModelReport | KvReport

_to_host: msgspec.msgpack.Decoder[ToHost] = msgspec.msgpack.Decoder(ToHost)
_from_host: msgspec.msgpack.Decoder[FromHost] = msgspec.msgpack.Decoder(FromHost)


def decode_to_host(data: bytes) -> ToHost:
    """Decode a message to an agent. Raises MalformedMessage."""
    return decode(_to_host, data)


def decode_from_host(data: bytes) -> FromHost:
    """Decode a message of an agent. Raises MalformedMessage."""
    return decode(_from_host, data)
