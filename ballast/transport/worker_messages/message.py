"""Define the base class of messages between server and worker."""

from __future__ import annotations

import msgspec


class WorkerMessage(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A message that carries the name of its class, and no field beyond its schema."""
