"""Move weights of one device over the links of several at once (Prism, 5.3).

Pieces come over each device's link to the host, and from there to the device that loads, over the
ports between the two. Used by `sim.link` for activations, where a cluster's links say so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from ballast.core.units import MiB
from ballast.sim.fluid import Ceiling, Ended

PIECE = 30 * MiB
"""Bytes that a device passes on at a time: the paper's buffer."""


class Carrier(Protocol):
    """What moves bytes over one path, one after another: `sim.link.Stream`."""

    def carry(
        self,
        now: float,
        n_bytes: int,
        ended: Ended,
        ceiling: Ceiling | None = None,
        transfer: int | None = None,
    ) -> None:
        """Move bytes after those that are on their way; call `ended` at their end."""

    def stop(self, now: float, transfer: int) -> bool:
        """Drop what is to come of a transfer; returns whether there was any."""


@dataclass(slots=True)
class QueuedBytes:
    """Bytes that end together; later parts end after it."""

    left: int
    """Bytes that no path carries yet."""
    ended: Ended
    ceiling: Ceiling | None
    transfer: int | None
    """Number of the transfer to which they belong; None: of no device's loop."""
    reserved: float = 0.0
    begun: float | None = None
    open: int = 0
    """Pieces on their way."""


class WideStream:
    """Bytes that move over several paths at once, each of which takes the next piece."""

    def __init__(self, paths: Sequence[Carrier]) -> None:
        """`paths`: the device's own first, which takes a lone piece."""
        self._paths = paths
        self._carries: list[QueuedBytes | None] = [None] * len(paths)
        self._parts: deque[QueuedBytes] = deque()

    def carry(
        self,
        now: float,
        n_bytes: int,
        ended: Ended,
        ceiling: Ceiling | None = None,
        transfer: int | None = None,
    ) -> None:
        """As `Carrier.carry`."""
        self._parts.append(QueuedBytes(n_bytes, ended, ceiling, transfer))
        self._fill(now)

    def stop(self, now: float, transfer: int) -> bool:
        """As `Carrier.stop`."""
        kept = deque(part for part in self._parts if part.transfer != transfer)
        if len(kept) == len(self._parts):
            return False
        self._parts = kept
        for i, part in enumerate(self._carries):
            if part is not None and part.transfer == transfer:
                self._paths[i].stop(now, transfer)
                self._carries[i] = None
        self._fill(now)
        return True

    def _fill(self, now: float) -> None:
        """Have every free path carry the next piece."""
        waiting = (part for part in self._parts if part.left or part.begun is None)
        for i, carried in enumerate(self._carries):
            part = None if carried is not None else next(waiting, None)
            if part is None:
                continue
            piece = min(PIECE, part.left)
            part.begun = now if part.begun is None else part.begun
            part.left -= piece
            part.open += 1
            self._carries[i] = part
            landed: Callable[[float, float], None] = partial(self._landed, i, part)
            self._paths[i].carry(now, piece, landed, part.ceiling, part.transfer)

    def _landed(self, path: int, part: QueuedBytes, at: float, seconds: float) -> None:
        self._carries[path] = None
        part.open -= 1
        self._fill(at)
        while self._parts and not self._parts[0].left and not self._parts[0].open:
            done = self._parts.popleft()
            assert done.begun is not None, "its pieces have landed"
            done.ended(at, at - done.begun)
