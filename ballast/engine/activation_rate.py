"""Estimate the rate, in bytes per second, at which activations bring weights to a device."""

from __future__ import annotations

_DECAY = 0.5 ** (1 / 8)
"""Factor on an activation's weight with each one that follows: 8 activations later it counts half,
so that the rate follows a link whose other transfers come and go."""


class ActivationRate:
    """Bytes per second of activations, from their order to the moment when the weights are there.

    Activations are served one after another (`memory.transfer.ACTIVATIONS`), so that the time of
    each begins with its own order or with the end of the one before, whichever comes later. It
    contains all that an activation takes: pages mapped, bytes copied beside other streams and the
    other direction, and the turn of the loop that takes the end in.
    """

    def __init__(self) -> None:
        self._ordered: dict[int, float] = {}
        """Time at which each transfer in flight was ordered, by its number, in seconds."""
        self._last_end = float("-inf")
        self._bytes = self._seconds = 0.0
        """Decayed sums over activations that have ended."""

    @property
    def bytes_per_second(self) -> float | None:
        """Decayed mean rate over ended activations; None: none has ended."""
        return self._bytes / self._seconds if self._seconds else None

    def begin(self, transfer: int, now: float) -> None:
        """Record that a transfer of weights has been ordered."""
        self._ordered[transfer] = now

    def end(self, transfer: int, n_bytes: int, now: float, *, failed: bool) -> None:
        """Record the end of a transfer of `n_bytes`; a failed one is not counted."""
        seconds = now - max(self._ordered.pop(transfer), self._last_end)
        self._last_end = now
        if failed or n_bytes <= 0 or seconds <= 0:
            return
        self._bytes = self._bytes * _DECAY + n_bytes
        self._seconds = self._seconds * _DECAY + seconds
