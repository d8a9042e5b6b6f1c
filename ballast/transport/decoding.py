"""Decode MessagePack by a schema, and raise `MalformedMessage` for data that does not follow it.

Used by both codecs: server and worker, first and further ranks.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from ballast.core.errors import BallastError

M = TypeVar("M")


class MalformedMessage(BallastError):
    """A message does not follow the schema: the two processes are of different versions."""


def decode(decoder: msgspec.msgpack.Decoder[M], data: bytes, name: str = "message") -> M:
    """Decode one message; errors call it `name`. Raises MalformedMessage."""
    try:
        return decoder.decode(data)
    except msgspec.DecodeError as error:
        raise MalformedMessage(f"malformed {name}: {error}") from error
