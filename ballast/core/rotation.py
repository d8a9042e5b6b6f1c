"""Choose which layers of a model rotate through shared slots, and compute stalls (MIRAGE, 5.4).

Used by remapping policies and, as plain data (`Rotation`), by the engine, slots and streams.
Pure formulas: nothing is copied here.

The layers of a decoder run in a circle: after the last layer of one token comes the first of the
next. Of `n` layers, `m = alpha + beta` *rotate* through `beta` *slots*, each as large as a layer:
each is loaded into its slot before it runs and replaces the layer that used the slot before. This
frees the memory of `alpha` layers.

Times are seconds, but only their ratios count: `transfer` is the copy of one layer, `compute` the
work of one layer, `outside` the part of a pass beside its layers (embeddings, head, sampling, the
loop).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import ceil, floor, inf

from ballast.core.errors import BrokenPromise
from ballast.core.omitted import OMITTED
from ballast.core.spacing import even, grown

NEGLIGIBLE = 1e-9
"""Fraction of a pass below which a stall is rounding error."""
MOST_SLOTS = 3
"""Largest number of slots to try: a third helps if more than about half of the layers rotate. With
more than alpha slots, some slots have a single layer, which need not rotate."""


REMAPPED = 0.01
"""Stall that is accepted to avoid remapping one more layer, as a fraction of a pass. Remapping a
layer of hundreds of pages takes about as long as a pass, and plans last for tens of passes."""


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotating layers and their slots."""

    layers: tuple[int, ...] = ()
    """Rotating layers, ascending, counted from 0; more than `slots`, or none."""
    slots: int = 0
    """Number of slots (beta); 0: no layer rotates."""
    assigned: tuple[int, ...] = field(default=(), metadata=OMITTED)
    """Slot of each of `layers`; empty where the slots are used in turn, the i-th layer having slot
    `i % slots`, as in all stories recorded before this field existed."""

    def __post_init__(self) -> None:
        if self.assigned == self._in_turn():
            object.__setattr__(self, "assigned", ())

    @classmethod
    def of(cls, slot_of: Mapping[int, int]) -> Rotation:
        """Return the rotation in which each layer has the slot given."""
        layers = tuple(sorted(slot_of))
        slots = 1 + max(slot_of.values(), default=-1)
        return cls(layers, slots, tuple(slot_of[i] for i in layers))

    def _in_turn(self) -> tuple[int, ...]:
        return tuple(i % self.slots for i in range(len(self.layers))) if self.slots > 0 else ()

    @property
    def n_freed(self) -> int:
        """Number of layers whose memory is freed (alpha)."""
        return len(self.layers) - self.slots

    @property
    def loads(self) -> int:
        """Loads per pass: layers that share their slot with another."""
        shared = (len(self.of_slot(slot)) for slot in range(self.slots))
        return sum(n for n in shared if n > 1)

    def of_slot(self, slot: int) -> tuple[int, ...]:
        """Return the layers that share a slot, in the order in which they run."""
        if not self.assigned:
            return self.layers[slot :: self.slots]
        return tuple(i for i, s in zip(self.layers, self.assigned, strict=True) if s == slot)

    @property
    def slot_of(self) -> dict[int, int]:
        """Slot of each rotating layer, in the order in which they run."""
        return dict(zip(self.layers, self.assigned or self._in_turn(), strict=True))

    @property
    def first(self) -> tuple[int, ...]:
        """By slot, the layer that a pass begins with."""
        return tuple(self.of_slot(slot)[0] for slot in range(self.slots))

    @property
    def next_of(self) -> dict[int, int]:
        """For each rotating layer, the next layer in its slot; itself if the slot has no other."""
        circles = map(self.of_slot, range(self.slots))
        return {a: b for c in circles for a, b in zip(c, (*c[1:], *c[:1]), strict=True)}

    def refusal(self, rotatable: Collection[int]) -> str | None:
        """Return why these layers cannot rotate in a model of which only `rotatable` layers can;
        None: they can."""
        if self == WHOLE:
            return None
        if not 0 < self.slots < len(self.layers):
            return f"{len(self.layers)} layers cannot rotate through {self.slots} slots"
        if list(self.layers) != sorted(set(self.layers)):
            return "rotating layers are named once each, in order"
        if not set(self.layers).issubset(rotatable):
            return f"of {self.layers} not all can rotate"
        if self.assigned and len(self.assigned) != len(self.layers):
            return f"slots are stated for {len(self.assigned)} of {len(self.layers)} layers"
        if self.assigned and set(self.assigned) != set(range(self.slots)):
            return f"each of {self.slots} slots has layers, and layers no other slots"
        return None

    def remapped(self, after: Rotation) -> int:
        """Return the number of layers of which a change to `after` changes the mapping: those that
        begin or cease to rotate, or get another slot."""
        ours, theirs = self.slot_of, after.slot_of
        return sum(ours.get(i) != theirs.get(i) for i in {*ours, *theirs})


WHOLE = Rotation()
"""Every layer has memory of its own."""


def single(n: int, alpha: int, transfer: float, compute: float) -> bool:
    """Return whether one slot hides its loads, on average over the gaps (MIRAGE, equation 4)."""
    return transfer * (alpha + 1) <= compute * (n - alpha - 1)


def double(n: int, alpha: int, transfer: float, compute: float) -> bool:
    """Return whether two slots hide their loads, on average over the gaps (MIRAGE, equation 5)."""
    return transfer * (alpha + 2) <= compute * n


def most(
    n: int,
    rotatable: Collection[int],
    transfer: float,
    pass_seconds: float,
    slots: int | None = None,
) -> int:
    """Return the largest number of layers to free whose loads a pass can hide (MIRAGE, 5.3).

    The paper bounds the number of remapped layers; here all m rotating layers use the link, so
    m <= floor(pass_seconds / transfer). `slots`: overrides the choice by equation 4.
    """
    loads = pass_seconds / transfer * (1 + NEGLIGIBLE) if transfer else inf
    m = floor(min(len(rotatable), loads))
    if slots is None:
        slots = 1 if single(n, m - 1, transfer, pass_seconds / n) else 2
    return max(0, m - slots)


def spread(
    n: int, rotatable: Collection[int], m: int, near: Collection[int] = ()
) -> tuple[int, ...]:
    """Return `m` of the `rotatable` layers, evenly spaced on the circle of `n` (MIRAGE, 5.4).

    Maximises the smallest gap; among equally even choices, the number of layers in `near`.
    """
    wanted = set(near)
    choices = even(n, tuple(sorted(rotatable)), m)
    if not choices:
        raise BrokenPromise(f"{m} layers are to rotate of {len(rotatable)} that can")
    return min(choices, key=lambda layers: (-len(wanted.intersection(layers)), layers))


@lru_cache(maxsize=16384)
def stall(
    n: int, rotation: Rotation, transfer: float, compute: float, outside: float = 0.0
) -> float:
    """Return the seconds that a pass waits for layers, in the steady state; exact, not an average.

    Layers run in order, each when the one before it is done and, if it rotates, it is loaded. The
    load of a slot's next layer is issued as soon as the slot's present layer is done, never before,
    so that none is overwritten unused; one link serves loads in the order of issue.

    Starts and ends are maxima of sums, so a pass maps the state at its beginning (the delay, and
    per slot when its layer will be loaded) to that of the next pass linearly in the (max, +)
    algebra. The long-run time of a pass is the greatest mean weight of a cycle of that map (Karp,
    Discrete Mathematics 23, 1978), also where waits alternate from pass to pass.
    """
    shared = [slot for slot in range(rotation.slots) if len(rotation.of_slot(slot)) > 1]
    uses = [
        (layer * compute, 1 + shared.index(slot))
        for layer, slot in rotation.slot_of.items()
        if slot in shared
    ]
    period = n * compute + outside
    size = 1 + len(shared)
    states = [[0.0] + [-inf] * len(shared)]
    for _ in range(size):
        delay, *_ = state = list(states[-1])
        link = max(state[1:], default=-inf)
        for begin, slot in uses:
            delay = max(delay, state[slot] - begin)
            link = state[slot] = max(link, begin + compute + delay) + transfer
        states.append([delay, *(at - period for at in state[1:])])
    worst = max(
        min(
            (states[size][v] - states[k][v]) / (size - k)
            for k in range(size)
            if states[k][v] > -inf
        )
        for v in range(size)
    )
    return worst if worst > NEGLIGIBLE * period else 0.0


@lru_cache(maxsize=4096)
def best(
    n: int,
    rotatable: tuple[int, ...],
    alpha: int,
    transfer: float,
    compute: float,
    outside: float = 0.0,
    now: Rotation = WHOLE,
    slots: int | None = None,
) -> Rotation | None:
    """Return the rotation that frees `alpha` layers with the least stall, where each layer whose
    mapping changes without need counts as `REMAPPED`; then that with the fewest loads, then that
    with the fewest changes; None: too few layers can rotate.

    Equations 4 and 5 are averages, and assume two slots used in turn, which fails for odd m where
    the circle closes. So exact stalls are compared, of one to three slots and of several sets of
    layers: evenly spaced ones whose slots are used in turn, ones with a wider gap where the circle
    closes, and the rotation `now` with a few layers added or removed, while all others keep their
    slots. `slots`: fixes their number, at most alpha.
    """
    if alpha <= 0:
        return WHOLE
    period = n * compute + outside
    slack = NEGLIGIBLE * period
    found: tuple[tuple[float, int, int], Rotation] | None = None
    tries = []
    for beta in (min(slots, alpha),) if slots else range(1, min(alpha, MOST_SLOTS) + 1):
        # Lower bound for any order of loads: one link carries them all, and with a single slot it
        # is idle while the slot's layer runs.
        a_load = transfer + (compute if beta == 1 else 0.0)
        if alpha + beta <= len(rotatable):
            tries.append((max(0.0, (alpha + beta) * a_load - period), beta))
    for least, beta in sorted(tries):
        if found and (found[0][0] == 0.0 or found[0][0] < least - slack):
            break
        plans = _candidates(n, rotatable, alpha + beta, beta, outside / compute, now)
        needed = abs(alpha + beta - len(now.layers))
        for moved, plan in sorted(((now.remapped(p), p) for p in plans), key=_fewest_changes):
            changes = REMAPPED * period * (moved - needed)
            if found and found[0][0] < least + changes - slack:
                break
            cost = stall(n, plan, transfer, compute, outside) + changes
            if found and abs(cost - found[0][0]) <= slack:
                cost = found[0][0]
            key = cost, len(plan.layers), moved
            if found is None or key < found[0]:
                found = key, plan
            if cost <= least + changes + slack:
                break
    return found[1] if found else None


def _fewest_changes(tried: tuple[int, Rotation]) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    return tried[0], tried[1].layers, tried[1].assigned


def _candidates(
    n: int,
    rotatable: tuple[int, ...],
    m: int,
    beta: int,
    outside: float,
    now: Rotation,
) -> set[Rotation]:
    """Return candidates for `best`: `m` layers in `beta` slots; `outside` is in units of layers."""
    rounds = {n + min(n, floor(outside)), n + min(n, ceil(outside))}
    if m % beta:
        # Where the circle closes, two consecutive layers have the same slot, which loses one.
        rounds |= {around - 1 for around in rounds}
    found = set[Rotation]()
    if not set(now.layers).isdisjoint(rotatable):
        found.add(Rotation.of(grown(n, rotatable, m, beta, now.slot_of)))
    for around in rounds:
        for layers in even(around, tuple(x for x in rotatable if x < around), m):
            found.add(Rotation(layers, beta))
    return found
