"""When the tokens of one request came."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Timing:
    """Seconds on the server's clock."""

    arrived: float
    first: float | None = None
    last: float | None = None
    """Of the latest token."""
