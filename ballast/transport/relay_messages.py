"""Define the messages between the server and an HTTP relay of another host.

A relay carries the bytes of its clients' connections and reads none of them. Exchanged by
`RelayConnection` in the server and `HttpRelay` on the host; each client has a number.
"""

from __future__ import annotations

import msgspec

from ballast import __version__
from ballast.transport.decoding import decode
from ballast.transport.worker_messages.message import WorkerMessage

WINDOW_BYTES = 256 << 10
"""Bytes of a connection, in one direction, that may be on their way or wait at the other end; a
writer pauses above, a reader is paused above."""

# -- in both directions -------------------------------------------------------------------------


class ClientBytesMsg(WorkerMessage, frozen=True):
    """What a client has sent, or is sent."""

    id: int
    data: bytes


class BytesTakenMsg(WorkerMessage, frozen=True):
    """So many bytes of `ClientBytesMsg` wait at this end no longer."""

    id: int
    count: int


# -- to the relay -------------------------------------------------------------------------------


class WelcomeRelayMsg(WorkerMessage, frozen=True):
    """First message: the server takes clients."""


class CloseClientMsg(WorkerMessage, frozen=True):
    """Close a client's connection. `at_once`: without what has not been sent to it."""

    id: int
    at_once: bool


# -- to the server ------------------------------------------------------------------------------


class RelayHelloMsg(WorkerMessage, frozen=True):
    """The relay listens."""

    host: str
    port: int
    most_clients: int
    """Clients for which its process may open files."""
    version: str = __version__


class ClientCameMsg(WorkerMessage, frozen=True):
    """A client has connected, from this address."""

    id: int
    host: str
    port: int


class ClientLeftMsg(WorkerMessage, frozen=True):
    """A client's connection is closed, by either side."""

    id: int


ToRelay = WelcomeRelayMsg | ClientBytesMsg | BytesTakenMsg | CloseClientMsg
FromRelay = RelayHelloMsg | ClientCameMsg | ClientBytesMsg | BytesTakenMsg | ClientLeftMsg

_to_relay: msgspec.msgpack.Decoder[ToRelay] = msgspec.msgpack.Decoder(ToRelay)
_from_relay: msgspec.msgpack.Decoder[FromRelay] = msgspec.msgpack.Decoder(FromRelay)


def decode_to_relay(data: bytes) -> ToRelay:
    """Decode a message to a relay. Raises MalformedMessage."""
    return decode(_to_relay, data)


def decode_from_relay(data: bytes) -> FromRelay:
    """Decode a message of a relay. Raises MalformedMessage."""
    return decode(_from_relay, data)
