"""Rotating layers in virtual time: when each is there follows by arithmetic, without events.

A job gives each layer an equal part of its seconds: what is not layers (embeddings, head) counts as
theirs. It runs them in order, and waits for one that is not there. A layer is asked for when the
one before it in its slot is done; so the loads of a job, and those that the next one begins with,
are known when it begins.

The loads of a device are served one after another, in the time that nobody has taken before. Other
traffic counts as so many more streams beside them, with equal shares, as of the moment when the job
begins; that traffic itself is not slowed by loads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ballast.core.clock import Clock
from ballast.core.event import Settled
from ballast.core.link import Direction, LinkRates
from ballast.core.model import ModelSpec
from ballast.core.rotation import WHOLE, Rotation
from ballast.memory.copies import Copy
from ballast.sim.heap import EventHeap
from ballast.sim.link import SimLink
from ballast.weights.rotor import Loads

STAYS = -1
"""In place of a slot: the layer has memory of its own."""


class Schedule:
    """The time of a link, as the loads of a device take it."""

    def __init__(self, link: SimLink, rates: LinkRates) -> None:
        self._link, self._rates = link, rates
        self._taken: list[tuple[float, float]] = []
        """(from, to), in order; they do not overlap."""

    @property
    def rate(self) -> float:
        """Bytes per second of loads, beside what else is on the link now."""
        mixed = self._link.streams(Direction.TO_HOST) > 0
        others = self._link.streams(Direction.TO_DEVICE)
        return self._rates.of(Direction.TO_DEVICE, mixed) / (1 + others)

    def take(self, ready: float, seconds: float) -> float:
        """A load has what nobody has taken from `ready` on, until it has had its `seconds`; when
        that is."""
        taken = self._taken
        if not taken or taken[-1][1] <= ready:
            taken.append((ready, ready + seconds))
            return ready + seconds
        first = len(taken) - 1
        while first and taken[first - 1][1] > ready:
            first -= 1
        at, left, pieces = ready, seconds, []
        for begun, end in taken[first:]:
            if begun > at:
                gap = min(left, begun - at)
                pieces.append((at, at + gap))
                left -= gap
                if left <= 0:
                    break
            at = end
        if left > 0:
            pieces.append((at, at + left))
        taken[first:] = sorted(taken[first:] + pieces)
        return max((end for _, end in pieces), default=ready)

    def pass_time(self, now: float) -> None:
        """What was before `now` is of no account any more."""
        self._taken = [piece for piece in self._taken if piece[1] > now]


class SimRotor:
    """Implements `weights.rotor.Rotor`; `run` says how long a job waits."""

    def __init__(
        self,
        spec: ModelSpec,
        copies: Sequence[Copy],
        heap: EventHeap,
        clock: Clock,
        schedule: Schedule,
        loads: Loads,
        begun: Callable[[SimRotor], None],
    ) -> None:
        """`loads`: counts on; `begun` hears of each turn."""
        self.loads = loads
        self._begun = begun
        self._spec = spec
        self._bytes = [copy.n_bytes for copy in copies]
        self._heap, self._clock, self._schedule = heap, clock, schedule
        self._quiet = 0.0
        """When the last of all loads has landed."""
        self._back: dict[int, float] = {}
        """When layers that have memory of their own again are there; some have been for long."""
        self._asked: tuple[float, float] | None = None
        self._stall = 0.0
        """Of the job that was asked about last."""
        self._lay(WHOLE, ())

    @property
    def held(self) -> Sequence[int]:
        return tuple(self._held)

    def settle(self) -> None:
        self._heap.schedule(self._quiet, Settled(self._spec.name))

    def turn(self, rotation: Rotation, held: Sequence[int], missing: Sequence[int]) -> None:
        now, rate = self._clock.now(), self._schedule.rate
        self._begun(self)
        self._lay(rotation, held)
        firsts = {layer: i for i, layer in enumerate(rotation.layers[: rotation.slots])}
        for layer in sorted({*firsts, *missing}):
            slot = firsts.get(layer, STAYS)
            if slot == STAYS:
                self._back[layer] = self._bring(layer, now, rate)
            elif held[slot] != layer:
                self._held[slot] = layer
                self._there[layer] = self._bring(layer, now, rate)

    def forget(self) -> None:
        self._lay(WHOLE, ())

    def run(self, seconds: float) -> float:
        """A job of so many seconds begins: how many more it takes, because it waits for layers.

        The same if asked again at the same moment.
        """
        now = self._clock.now()
        if self._asked == (now, seconds):
            return self._stall
        self._asked, self._stall = (now, seconds), 0.0
        stops = self._rotating
        if self._back:
            self._back = {layer: at for layer, at in self._back.items() if at > now}
            stops = sorted([*stops, *((layer, STAYS) for layer in self._back)])
        if stops:
            self._stall = self._pass(now, seconds, stops)
            self.loads.stall_seconds += self._stall
        return self._stall

    def _pass(self, now: float, seconds: float, stops: Sequence[tuple[int, int]]) -> float:
        """A job's timeline, and its loads'; how long it waits."""
        self._schedule.pass_time(now)
        n, rate, there, held = self._spec.n_layers, self._schedule.rate, self._there, self._held
        stall = 0.0
        for layer, slot in stops:
            at = now + (seconds * (layer / n) + stall)
            late = (self._back[layer] if slot == STAYS else there.get(layer, at)) - at
            if late > 0:
                stall += late
            if slot != STAYS and (following := self._next[layer]) != layer:
                done = now + (seconds * ((layer + 1) / n) + stall)
                there[following] = self._bring(following, done, rate)
                held[slot] = following
        return stall

    def _lay(self, rotation: Rotation, held: Sequence[int]) -> None:
        """A rotation is in force, and no load on its way; `held`: as of `turn`."""
        self._held = list(held)
        self._rotating = list(rotation.slot_of.items())
        """(layer, slot)."""
        self._next = rotation.next_of
        self._there: dict[int, float] = {}
        """When a rotating layer will be there for the next job; in the past if left out."""
        self._back = {}

    def _bring(self, layer: int, ready: float, rate: float) -> float:
        """Load a layer, once it has been asked for at `ready`; when it has landed."""
        n_bytes, loads = self._bytes[layer], self.loads
        seconds = n_bytes / rate
        landed = self._schedule.take(ready, seconds)
        if landed > self._quiet:
            self._quiet = landed
        loads.n += 1
        loads.n_bytes += n_bytes
        loads.copy_seconds += seconds
        return landed


class SimRotors:
    """Of a device's models, by name."""

    def __init__(self, heap: EventHeap, clock: Clock, link: SimLink, rates: LinkRates) -> None:
        """`rates`: of copies to pages that are mapped; `link` carries the other traffic."""
        self._heap, self._clock = heap, clock
        self._schedule = Schedule(link, rates)
        self._rotors: dict[str, SimRotor] = {}
        """Those that have turned: a newcomer that is refused has not."""
        self.loads: dict[str, Loads] = {}
        """Of models that have left, too."""

    def make(self, spec: ModelSpec, copies: Sequence[Copy]) -> SimRotor:
        loads = self.loads.setdefault(spec.name, Loads())
        begun = partial(self._rotors.__setitem__, spec.name)
        return SimRotor(spec, copies, self._heap, self._clock, self._schedule, loads, begun)

    def stall(self, model: str, seconds: float) -> float:
        """As `SimRotor.run`; 0 of a model whose layers have always been there."""
        rotor = self._rotors.get(model)
        return 0.0 if rotor is None else rotor.run(seconds)
