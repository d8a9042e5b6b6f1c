"""Define the messages between the server and the processes that render its chat templates.

Both ends import this, and the processes little else of Ballast: they start with the server, on the
same cores.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from ballast.core.errors import InvalidRequest

MOST_BYTES = 64 << 20
"""Most bytes of text that a template may produce."""
LENGTH = 4
"""Size of a message's length prefix, in bytes."""

FORK, KILL, NUMBER_BYTES = b"f", b"k", 8
"""First byte of a message to the forking process: fork a child for the connection that is attached,
or kill the child whose number follows, in NUMBER_BYTES bytes."""
TEXT, REFUSED, BROKEN, TOO_MUCH = b"t", b"r", b"s", b"m"
"""First byte of a reply: the text follows, or the template's reason for refusing, or the error of
its syntax, or nothing."""


class TemplateJob(msgspec.Struct, frozen=True, kw_only=True):
    """One conversation to render, in the form that `transformers` takes."""

    template: str
    messages: list[Mapping[str, Any]]
    tools: list[Mapping[str, Any]] | None
    add_generation_prompt: bool
    continue_final_message: bool
    variables: Mapping[str, Any]
    """Special tokens, and the client's `chat_template_kwargs`."""

    def encoded(self) -> EncodedJob:
        """Encode the job as JSON. Raises InvalidRequest for a value that JSON cannot spell."""
        try:
            return EncodedJob(self.template, msgspec.json.encode(self))
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise refused(error) from error


class EncodedJob(NamedTuple):
    """A `TemplateJob` on its way to a child. Thousands of messages are one object, which no garbage
    collection visits while the job waits."""

    template: str
    json: bytes


def framed(message: bytes) -> bytes:
    """Add a message's length prefix."""
    return len(message).to_bytes(LENGTH, "big") + message


def received(connection: socket.socket) -> bytes | None:
    """Read the next message; None at the end of the connection."""
    head = _exactly(connection, LENGTH)
    return None if head is None else _exactly(connection, int.from_bytes(head, "big"))


def _exactly(connection: socket.socket, n: int) -> bytes | None:
    data = bytearray(n)
    at = 0
    while at < n:
        got = connection.recv_into(memoryview(data)[at:])
        if not got:
            return None
        at += got
    return bytes(data)


def refused(why: object) -> InvalidRequest:
    said = f"the model's chat template does not accept these messages: {why!s:.1000}"
    return InvalidRequest(said, "messages")
