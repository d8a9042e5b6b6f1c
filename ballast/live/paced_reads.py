"""Pace passes that read weights in host memory, as the link would if it were a device's own.

On a CPU host memory is as near as the device's, so a fleet whose link is paced has its passes wait:
the link carries the bytes of each layer that is read in place, and copies none. Two layers are
read ahead of the one that runs, as through two slots. Of a layer's experts only those are charged
that the pass has chosen, once it has. Rows of embeddings are not charged; what follows the layers
is, with the last of them.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Collection, Sequence
from typing import Protocol

from ballast.core.clock import Clock
from ballast.core.errors import DeviceError
from ballast.core.event import TransferDoneEvent
from ballast.core.job import SequenceWork
from ballast.kernels.paged_attention import LayerPlaces
from ballast.live.machine import Machine
from ballast.memory.copies import Copy
from ballast.memory.transfer import HostLink
from ballast.models.barriers import Barriers
from ballast.weights.residency import WeightsOnDevice

_AHEAD = 2
"""Layers that are read before their turn."""


class ChosenExperts(Protocol):
    """What an executor knows of the experts in a layer."""

    def expert_bytes(self, layer: int) -> int:
        """Return the bytes of all experts of a layer; 0: it has none, or they are always read."""

    def chosen_bytes(self, layer: int) -> int:
        """Return the bytes of those that the present pass, which has run the layer, has chosen."""


def paced(
    stream: Barriers,
    weights: WeightsOnDevice,
    machine: Machine,
    clock: Clock,
    experts: ChosenExperts,
) -> Barriers:
    """Return barriers that pace what an executor reads in place too, if the link has a pace."""
    link = machine.link
    if not isinstance(link, HostLink) or not link.paced:
        return stream
    return PacedReads(stream, weights, link, clock, experts)


class PacedReads:
    """Implements `Barriers` over a stream's own, for one executor of a model on a paced link."""

    def __init__(
        self,
        inner: Barriers,
        weights: WeightsOnDevice,
        link: HostLink,
        clock: Clock,
        experts: ChosenExperts,
    ) -> None:
        self._inner, self._weights, self._link, self._clock = inner, weights, link, clock
        self._experts = experts
        self._stream = f"in place:{weights.spec.name}"
        self._change = threading.Condition()
        self._ids = itertools.count(1)
        self._coming: set[int] = set()
        """Reads that have not ended."""
        self._error: str | None = None
        self._inner_stops: Collection[int] = ()
        self._layers: list[int] = []
        """Layers of the pass that are read in place, and not yet begun, in order."""
        self._reads: dict[int, tuple[int, ...]] = {}
        """By layer, the reads without which it does not run."""
        self._last = -1
        self._late: tuple[int, ...] = ()
        """Reads of chosen experts, for which the next layer waits."""
        self._stalled = 0.0

    def places(self, work: Sequence[SequenceWork]) -> LayerPlaces | None:
        return self._inner.places(work)

    def begin_pass(self, work: Sequence[SequenceWork] = ()) -> Collection[int]:
        self._inner_stops = self._inner.begin_pass(work)
        in_place = self._weights.plan.in_place
        n_layers = self._weights.spec.n_layers
        layers = [i for i in range(n_layers) if 1 + i in in_place]
        self._error, self._late, self._reads = None, (), {}
        self._last = layers[-1] if layers else -1
        self._layers = list(layers)
        for _ in range(_AHEAD):
            self._read_next()
        return sorted({*self._inner_stops, *layers}) if layers else self._inner_stops

    def wait(self, layer: int) -> None:
        if layer in self._inner_stops:
            self._inner.wait(layer)
        if layer in self._reads:
            late, self._late = self._late, ()
            self._await((*late, *self._reads[layer]))

    def used(self, layer: int) -> None:
        if layer in self._inner_stops:
            self._inner.used(layer)
        if layer in self._reads:
            chosen = self._experts.chosen_bytes(layer)
            if chosen:
                self._late = (*self._late, self._read(layer, chosen))
            self._read_next()

    def finish(self) -> None:
        try:
            self._await(tuple(self._coming))
        finally:
            self._inner.finish()

    def move(self) -> None:
        self._inner.move()

    def stalled(self) -> float:
        seconds, self._stalled = self._stalled, 0.0
        return seconds + self._inner.stalled()

    def _read_next(self) -> None:
        """Begin to read the next layer of the pass, if there is one."""
        if not self._layers:
            return
        layer = self._layers.pop(0)
        table, in_place = self._weights.segments, self._weights.plan.in_place
        n_bytes = table[1 + layer].n_bytes - self._experts.expert_bytes(layer)
        if layer == self._last:
            after = range(1 + self._weights.spec.n_layers, len(table))
            n_bytes += sum(table[i].n_bytes for i in after if i in in_place)
        self._reads[layer] = (self._read(layer, n_bytes),)

    def _read(self, layer: int, n_bytes: int) -> int:
        """Have the link carry bytes of a layer; returns the number of the read."""
        number = next(self._ids)
        source = self._weights.segments[1 + layer].host_address
        with self._change:
            self._coming.add(number)
        copies = (Copy(0, source, max(1, n_bytes)),)
        try:
            self._link.start(number, copies, self._stream, on_done=self._ended, in_place=True)
        except DeviceError:
            with self._change:
                self._coming.discard(number)
            raise
        return number

    def _ended(self, done: TransferDoneEvent) -> None:
        with self._change:
            self._coming.discard(done.transfer_id)
            self._error = self._error or done.error
            self._change.notify_all()

    def _await(self, numbers: Sequence[int]) -> None:
        """Wait for the end of reads. Raises DeviceError if the link has been closed."""
        began = self._clock.now()
        with self._change:
            while not self._coming.isdisjoint(numbers):
                self._change.wait()
            self._stalled += self._clock.now() - began
            if self._error is not None:
                raise DeviceError("link", f"weights could not be read: {self._error}")
