"""Define the messages between the agents of two hosts, of which one sends the other KV.

The receiver grants the sender how many chunks may be on their way.
"""

from __future__ import annotations

import msgspec

from ballast.transport.decoding import decode
from ballast.transport.worker_messages.message import WorkerMessage

CHUNK_BYTES = 1 << 20
"""Bytes of every chunk but the last one."""
LONGEST_TO_SENDER = 4096
LONGEST_TO_RECEIVER = CHUNK_BYTES + 4096
"""Bounds of an encrypted message; a connection on which a longer one is announced ends."""


class ReadKvMsg(WorkerMessage, frozen=True):
    """Send the bytes that were offered by a ticket."""

    id: int
    ticket: str
    n_bytes: int
    """What the receiver expects."""
    window: int
    """Chunks that may be sent before the first `MoreKvMsg`."""


class MoreKvMsg(WorkerMessage, frozen=True):
    """One more chunk may be sent."""

    id: int


class StopKvMsg(WorkerMessage, frozen=True):
    """Send no more of it."""

    id: int


class KvChunkMsg(WorkerMessage, frozen=True):
    """The next bytes."""

    id: int
    data: bytes
    checksum: int
    """CRC-32 of `data`, as it was read from the device's memory."""


class KvFailedMsg(WorkerMessage, frozen=True):
    """The bytes do not come."""

    id: int
    why: str


ToKvSender = ReadKvMsg | MoreKvMsg | StopKvMsg
ToKvReceiver = KvChunkMsg | KvFailedMsg

_to_sender: msgspec.msgpack.Decoder[ToKvSender] = msgspec.msgpack.Decoder(ToKvSender)
_to_receiver: msgspec.msgpack.Decoder[ToKvReceiver] = msgspec.msgpack.Decoder(ToKvReceiver)


def decode_to_kv_sender(data: bytes) -> ToKvSender:
    """Decode a message to the host that has the KV. Raises MalformedMessage."""
    return decode(_to_sender, data)


def decode_to_kv_receiver(data: bytes) -> ToKvReceiver:
    """Decode a message of the host that has the KV. Raises MalformedMessage."""
    return decode(_to_receiver, data)
