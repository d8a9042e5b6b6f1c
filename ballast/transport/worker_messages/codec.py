"""Encode and decode the messages between server and worker, by direction.

Used by both ends of `transport.sockets`; a message outside its direction's union is refused.
"""

from __future__ import annotations

import msgspec

from ballast.transport.decoding import decode
from ballast.transport.worker_messages.admin_messages import CommandDoneMsg, CommandMsg
from ballast.transport.worker_messages.lending_messages import (
    LeaseMsg,
    MeetPeerMsg,
    PeerEndedMsg,
    PeerReportMsg,
)
from ballast.transport.worker_messages.lifecycle_messages import (
    ConfigureMsg,
    DrainedMsg,
    DrainMsg,
    HeartbeatMsg,
    HelloMsg,
    NotReadyMsg,
    ReadyMsg,
    StatusMsg,
    StopMsg,
)
from ballast.transport.worker_messages.migration_messages import (
    MigrationAnswerMsg,
    MigrationOrderMsg,
)
from ballast.transport.worker_messages.request_messages import (
    FlowControlMsg,
    OutputsMsg,
    SubmitMsg,
    WithdrawMsg,
)

ToWorker = (
    ConfigureMsg
    | SubmitMsg
    | WithdrawMsg
    | FlowControlMsg
    | DrainMsg
    | StopMsg
    | CommandMsg
    | MeetPeerMsg
    | PeerEndedMsg
    | LeaseMsg
    | MigrationOrderMsg
)

ToServer = (
    HelloMsg
    | HeartbeatMsg
    | ReadyMsg
    | NotReadyMsg
    | StatusMsg
    | OutputsMsg
    | DrainedMsg
    | CommandDoneMsg
    | PeerReportMsg
    | LeaseMsg
    | MigrationAnswerMsg
)

_encoder = msgspec.msgpack.Encoder()
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_to_server: msgspec.msgpack.Decoder[ToServer] = msgspec.msgpack.Decoder(ToServer)


def encode(message: msgspec.Struct) -> bytes:
    """Encode a message as MessagePack."""
    return _encoder.encode(message)


def decode_to_worker(data: bytes) -> ToWorker:
    """Decode a message to a worker. Raises MalformedMessage."""
    return decode(_to_worker, data)


def decode_to_server(data: bytes) -> ToServer:
    """Decode a message to the server. Raises MalformedMessage."""
    return decode(_to_server, data)
