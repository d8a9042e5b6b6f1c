"""Define the protocol of copy engines, which make the copies that a `LayerStream` orders.

One page for all: the host link with its threads, CUDA streams with events, flows in virtual time,
a peer's memory. A driver has one engine for each buffer, and tells the stream how its copies end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from ballast.residency.buffer import LayerCopy

Token = TypeVar("Token")
"""What another copy or a pass can wait for: an event; None where copies are submitted only when
nothing is left to wait for."""


class CopyEngine(Protocol[Token]):
    """Makes the copies of one buffer; those of one direction in the order of submission."""

    def submit(self, copy: LayerCopy, after: Sequence[Token]) -> Token:
        """Start a copy once all of `after` has happened, and return at once. Raises DeviceError if
        it cannot be started; nothing of it is in flight then."""
