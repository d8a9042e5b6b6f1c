"""Define the messages between the agents of two hosts, of which one sends the other a model.

The receiver asks for each chunk, so that no more is on its way than it has asked for.
"""

from __future__ import annotations

import msgspec

from ballast.transport.decoding import decode
from ballast.transport.worker_messages.message import WorkerMessage

CHUNK_BYTES = 1 << 20
"""Bound of a chunk."""


class GetRecordMsg(WorkerMessage, frozen=True):
    """Send the model's record."""


class GetChunkMsg(WorkerMessage, frozen=True):
    """Send a part of a segment."""

    digest: str
    offset: int
    size: int


class RecordMsg(WorkerMessage, frozen=True):
    """The model's record."""

    record: bytes


class ChunkMsg(WorkerMessage, frozen=True):
    """A part of a segment, in the order in which they were asked for."""

    data: bytes


ToSender = GetRecordMsg | GetChunkMsg
ToReceiver = RecordMsg | ChunkMsg

_to_sender: msgspec.msgpack.Decoder[ToSender] = msgspec.msgpack.Decoder(ToSender)
_to_receiver: msgspec.msgpack.Decoder[ToReceiver] = msgspec.msgpack.Decoder(ToReceiver)


def decode_to_sender(data: bytes) -> ToSender:
    """Decode a message to the host that has the model. Raises MalformedMessage."""
    return decode(_to_sender, data)


def decode_to_receiver(data: bytes) -> ToReceiver:
    """Decode a message of the host that has the model. Raises MalformedMessage."""
    return decode(_to_receiver, data)
