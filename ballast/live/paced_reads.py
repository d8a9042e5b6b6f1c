"""Pace passes that read in place what lies elsewhere, as a link would if it were read over one.

On a CPU host memory and other devices' memory are as near as the device's own, so a fleet whose
link is paced has its passes wait: the link carries the bytes of each layer that is read in place,
and copies none but those that are read in slots (`peer_slots`). Two layers are read ahead of the
one that runs. What a layer writes elsewhere is carried after it, behind the rest of the pass, which
ends when all is carried. `in_place_reads` has what is read: weights on the host, KV on pages of
other devices.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Collection, Sequence
from functools import partial
from typing import Protocol

from ballast.core.clock import Clock
from ballast.core.errors import DeviceError
from ballast.core.event import TransferDoneEvent
from ballast.core.job import SequenceWork
from ballast.core.link import Direction
from ballast.kernels.paged_attention import LayerPlaces
from ballast.memory.copies import Copy
from ballast.memory.transfer import HostLink
from ballast.models.barriers import Barriers, carried

_AHEAD = 2
"""Layers that are read before their turn."""


class LayerReads(Protocol):
    """What the passes of one model read and write in place. Called by the lane that runs them."""

    @property
    def name(self) -> str:
        """Name of its stream on the link."""

    @property
    def reserved(self) -> float:
        """Bytes per second of a link that devices share that a pass has at least."""

    def places(self, work: Sequence[SequenceWork]) -> LayerPlaces | None:
        """Return where a pass that computes `work` reads copies; None: it reads none."""

    def begin_pass(self, work: Sequence[SequenceWork]) -> Sequence[int]:
        """Return the layers, ascending, that a pass which computes `work` reads or writes
        elsewhere."""

    def read_bytes(self, layer: int) -> int:
        """Return the bytes that the pass reads in place of a layer before it runs."""

    def copies(self, layer: int) -> Sequence[Copy]:
        """Return the copies that the pass reads of a layer; they overwrite those of the second
        layer before it, which has run."""

    def late_bytes(self, layer: int) -> int:
        """Return the bytes that the pass has found out to read while the layer ran; the next layer
        waits for them."""

    def written_bytes(self, layer: int) -> int:
        """Return the bytes that the pass has written of a layer that has run."""


class PacedReads:
    """Implements `Barriers` over a stream's own, for one executor of a model on a paced link."""

    def __init__(self, inner: Barriers, link: HostLink, clock: Clock, reads: LayerReads) -> None:
        self._inner, self._link, self._clock, self._reads = inner, link, clock, reads
        self._change = threading.Condition()
        self._ids = itertools.count(1)
        self._coming: set[int] = set()
        """Transfers that have not ended."""
        self._error: str | None = None
        self._inner_stops: Collection[int] = ()
        self._layers: list[int] = []
        """Layers of the pass that are not yet begun to be read, in order."""
        self._needs: dict[int, tuple[int, ...]] = {}
        """By layer, the transfers without which it does not run."""
        self._late: tuple[int, ...] = ()
        """Transfers for which the next layer waits."""
        self._stalled = 0.0
        self._carried = dict.fromkeys(Direction, 0.0)
        """Seconds of transfers that have ended since the last call of `carried`."""

    def places(self, work: Sequence[SequenceWork]) -> LayerPlaces | None:
        own, inner = self._reads.places(work), self._inner.places(work)
        if own is None or inner is None:
            return own or inner
        return inner.beside(own)

    def begin_pass(self, work: Sequence[SequenceWork] = ()) -> Collection[int]:
        self._inner_stops = self._inner.begin_pass(work)
        layers = self._reads.begin_pass(work)
        self._error, self._late, self._needs = None, (), {}
        self._layers = list(layers)
        if layers:
            self._link.reserve(self._reads.name, self._reads.reserved)
        for _ in range(_AHEAD):
            self._read_next()
        return sorted({*self._inner_stops, *layers}) if layers else self._inner_stops

    def wait(self, layer: int) -> None:
        if layer in self._inner_stops:
            self._inner.wait(layer)
        if layer in self._needs:
            late, self._late = self._late, ()
            self._await((*late, *self._needs[layer]))

    def used(self, layer: int) -> None:
        if layer in self._inner_stops:
            self._inner.used(layer)
        if layer in self._needs:
            late, written = self._reads.late_bytes(layer), self._reads.written_bytes(layer)
            if late:
                self._late = (*self._late, self._carry(late))
            if written:
                self._carry(written, Direction.TO_HOST)
            self._read_next()

    def finish(self) -> None:
        try:
            self._await(tuple(self._coming))
        finally:
            self._link.reserve(self._reads.name, 0.0)
            self._inner.finish()

    def move(self) -> None:
        self._inner.move()

    def stalled(self) -> float:
        seconds, self._stalled = self._stalled, 0.0
        return seconds + self._inner.stalled()

    def carried(self) -> tuple[float, float]:
        with self._change:
            mine = tuple(self._carried.values())
            self._carried = dict.fromkeys(Direction, 0.0)
        here = carried(self._inner)
        return mine[0] + here[0], mine[1] + here[1]

    def _read_next(self) -> None:
        """Begin to read the next layer of the pass, if there is one."""
        if self._layers:
            layer = self._layers.pop(0)
            n_bytes, copies = self._reads.read_bytes(layer), self._reads.copies(layer)
            needs = [self._carry(n_bytes)] if n_bytes else []
            if copies:
                needs.append(self._start(copies, Direction.TO_DEVICE, in_place=False))
            self._needs[layer] = tuple(needs)

    def _carry(self, n_bytes: int, direction: Direction = Direction.TO_DEVICE) -> int:
        """Have the link carry bytes that nobody copies; returns the number of the transfer."""
        return self._start((Copy(0, 0, n_bytes),), direction, in_place=True)

    def _start(self, copies: Sequence[Copy], direction: Direction, *, in_place: bool) -> int:
        number, stream = next(self._ids), self._reads.name
        with self._change:
            self._coming.add(number)
        try:
            done = partial(self._ended, direction)
            self._link.start(number, copies, stream, direction, on_done=done, in_place=in_place)
        except BaseException:  # whatever it was: nobody will say that the transfer has ended
            with self._change:
                self._coming.discard(number)
            raise
        return number

    def _ended(self, direction: Direction, done: TransferDoneEvent) -> None:
        with self._change:
            self._carried[direction] += done.seconds
            self._coming.discard(done.transfer_id)
            self._error = self._error or done.error
            self._change.notify_all()

    def _await(self, numbers: Sequence[int]) -> None:
        """Wait for the end of transfers. Raises DeviceError if the link has been closed."""
        began = self._clock.now()
        with self._change:
            while not self._coming.isdisjoint(numbers):
                self._change.wait()
            self._stalled += self._clock.now() - began
            if self._error is not None:
                raise DeviceError("link", f"{self._reads.name} cannot be read: {self._error}")
