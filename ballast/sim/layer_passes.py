"""Simulate a job's pass through layers whose weights or KV arrive and leave during the pass.

Each layer gets an equal part of the job's work; embeddings and head are divided among the layers.
Layers run in order; the job waits for a layer that is not there, and computes nothing meanwhile.
`sim.layer_stream` and `sim.lending` implement `LayerSource`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from ballast.sim.change_queue import Change, ChangeQueue


class LayerSource(Protocol):
    """A source of layers or of data that they need."""

    @property
    def stops(self) -> Sequence[int]:
        """Layers, ascending, that a job which begins now may wait for or makes room at."""

    @property
    def waits(self) -> bool:
        """Whether a job that begins now may have to wait."""

    @property
    def open(self) -> bool:
        """Whether something must still move before the job that runs has ended."""

    def begin(self, now: float, job: Pass, read: int, written: int) -> None:
        """Begin `job`, which reads and writes KV of the given numbers of tokens. From now on the
        source calls `job.landed` and `job.closed`."""

    def lacks(self, layer: int) -> bool:
        """Whether a layer cannot be run yet."""

    def used(self, now: float, layer: int) -> None:
        """Notify that the job is done with a layer that is one of the source's stops."""

    def stalls(self, layer: int) -> None:
        """Notify that the job begins to wait for a layer that this source lacks."""

    def waited(self, seconds: float) -> None:
        """Notify that the job has waited so long since `stalls`."""


class Pace(Protocol):
    """How fast a job computes."""

    carried: tuple[float, float]
    """Seconds for which links carried what it reads, and what it writes, on borrowed pages."""

    def reach(self, fraction: float, then: Change) -> None:
        """Call `then` when the job has done this fraction of its work."""

    def pause(self, now: float) -> None:
        """Stop computing: the job waits."""

    def resume(self, now: float) -> None:
        """Resume computing."""

    def finish(self, now: float) -> None:
        """Let the job compute to its end, which it may have reached already."""


class Pass:
    """One job on its way through the layers."""

    def __init__(self, n_layers: int, sources: Sequence[LayerSource], pace: Pace) -> None:
        self._n, self._sources, self._pace = n_layers, sources, pace
        self._lacks = sources[0].lacks if len(sources) == 1 else self._any_lacks
        self._stops: Sequence[int] = ()
        self._at = 0
        """Index of the stop that the job comes to next, or is at."""
        self._waits: int | None = None
        """The layer that it waits for."""
        self._since = 0.0
        """When it began to wait."""
        self._blamed: list[LayerSource] = []
        """Sources that lacked the layer when the job began to wait."""
        self._computed = False
        """Whether all computing is done and only transfers of sources remain."""

    def begin(self, now: float, read: int = 0, written: int = 0) -> None:
        """Begin the pass. `read`, `written`: numbers of tokens whose KV the job reads and
        writes."""
        for source in self._sources:
            source.begin(now, self, read, written)
        self._stops = stops_of(self._sources)
        self._proceed(now)

    def landed(self, now: float, layer: int) -> None:
        """Notify that data that `layer` needed has arrived."""
        if self._waits == layer and not self._lacks(layer):
            self._waits = None
            for source in self._blamed:
                source.waited(now - self._since)
            self._pace.resume(now)
            self._pace.reach((layer + 1) / self._n, self._done)

    def carried(self, read: float, written: float) -> None:
        """Note seconds for which a link carried what the job reads or writes elsewhere."""
        before = self._pace.carried
        self._pace.carried = before[0] + read, before[1] + written

    def closed(self, now: float) -> None:
        """Notify that a source is not open any more."""
        if self._computed and not self._open:
            self._pace.resume(now)
            self._pace.finish(now)

    def _proceed(self, now: float) -> None:
        if self._at == len(self._stops):
            if self._open:
                self._pace.reach(1.0, self._all_computed)
            else:
                self._pace.finish(now)
            return
        layer = self._stops[self._at]
        if self._lacks(layer):
            self._pace.reach(layer / self._n, self._arrived)
        else:
            self._pace.reach((layer + 1) / self._n, self._done)

    def _arrived(self, now: float) -> None:
        layer = self._stops[self._at]
        if self._lacks(layer):
            self._waits, self._since = layer, now
            self._blamed = [source for source in self._sources if source.lacks(layer)]
            for source in self._blamed:
                source.stalls(layer)
            self._pace.pause(now)
        else:
            self._pace.reach((layer + 1) / self._n, self._done)

    def _done(self, now: float) -> None:
        layer = self._stops[self._at]
        self._at += 1
        for source in self._sources:
            source.used(now, layer)
        self._proceed(now)

    def _all_computed(self, now: float) -> None:
        if self._open:
            self._computed = True
            self._pace.pause(now)
        else:
            self._pace.finish(now)

    @property
    def _open(self) -> bool:
        return any(source.open for source in self._sources)

    def _any_lacks(self, layer: int) -> bool:
        return any(source.lacks(layer) for source in self._sources)


def stops_of(sources: Sequence[LayerSource]) -> Sequence[int]:
    """The stops of all `sources`, ascending, each once."""
    if len(sources) == 1:
        return sources[0].stops
    return sorted({layer for source in sources for layer in source.stops})


class Alone:
    """Pace of a job that has the whole device: it takes `seconds` plus its waits."""

    def __init__(self, agenda: ChangeQueue, began: float, seconds: float) -> None:
        self._agenda, self.began, self.seconds = agenda, began, seconds
        self.stall = 0.0
        """Seconds that it has waited."""
        self.carried = (0.0, 0.0)
        self.end: float | None = None
        """When it ends, once that is certain."""
        self.ended: Callable[[], None] | None = None
        """Called when `end` is known."""
        self._since = 0.0
        """When it began to wait."""

    def reach(self, fraction: float, then: Change) -> None:
        self._agenda.schedule(self.began + (self.seconds * fraction + self.stall), then)

    def pause(self, now: float) -> None:
        self._since = now

    def resume(self, now: float) -> None:
        self.stall += now - self._since

    def finish(self, now: float) -> None:
        self.end = max(now, self.began + (self.seconds + self.stall))
        self._agenda.expect(self.end)
        if self.ended is not None:
            self.ended()
