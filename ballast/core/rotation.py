"""Which layers of a model share slots, so that it gives up the memory of the others (MIRAGE, 5.4).

The layers of a decoder are run in a circle: after the last of one token comes the first of the
next. Of `n` layers, `m = alpha + beta` *rotate* through `beta` *slots*, each as large as a layer:
every one is brought to its slot before it is needed, in the place of the one used there before it.
The memory of `alpha` layers is free for something else.

Times are seconds throughout, but only their ratios count: `transfer` is the copy of one layer,
`compute` the work of one layer, `outside` what a pass does beside its layers (embeddings, head,
sampling, the loop).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, floor, inf

from ballast.core.errors import BrokenPromise
from ballast.core.spacing import even, grown

NEGLIGIBLE = 1e-9
"""Of a pass: a stall as short is rounding."""
MOST_SLOTS = 3
"""Worth trying: a third helps where more than about half of the layers rotate. Beyond alpha slots,
the layers of some share with no other, and might as well not rotate."""


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotating layers and their slots: the i-th of `layers` has slot `i % slots`."""

    layers: tuple[int, ...] = ()
    """Ascending, counted from 0; more than `slots`, or none."""
    slots: int = 0
    """beta; 0 where nothing rotates."""

    @property
    def n_freed(self) -> int:
        """Layers whose memory is given up: alpha."""
        return len(self.layers) - self.slots

    @property
    def loads(self) -> int:
        """Layers brought per pass: those that share their slot with another."""
        shared = (len(self.of_slot(slot)) for slot in range(self.slots))
        return sum(n for n in shared if n > 1)

    def of_slot(self, slot: int) -> tuple[int, ...]:
        """Layers that share a slot, in the order they are run."""
        return self.layers[slot :: self.slots]

    @property
    def slot_of(self) -> dict[int, int]:
        """By rotating layer, its slot."""
        return {layer: i % self.slots for i, layer in enumerate(self.layers)}

    @property
    def next_of(self) -> dict[int, int]:
        """By rotating layer, which its slot holds after it: itself where it shares with none."""
        circles = map(self.of_slot, range(self.slots))
        return {a: b for c in circles for a, b in zip(c, (*c[1:], *c[:1]), strict=True)}

    def refusal(self, rotatable: Collection[int]) -> str | None:
        """Why these layers cannot rotate in a model of which the `rotatable` can."""
        if self == WHOLE:
            return None
        if not 0 < self.slots < len(self.layers):
            return f"{len(self.layers)} layers cannot rotate through {self.slots} slots"
        if list(self.layers) != sorted(set(self.layers)):
            return "rotating layers are named once each, in order"
        if not set(self.layers).issubset(rotatable):
            return f"of {self.layers} not all can rotate"
        return None


WHOLE = Rotation()
"""Every layer has memory of its own."""


def single(n: int, alpha: int, transfer: float, compute: float) -> bool:
    """Whether one slot hides its loads, on average over the gaps (MIRAGE, equation 4)."""
    return transfer * (alpha + 1) <= compute * (n - alpha - 1)


def double(n: int, alpha: int, transfer: float, compute: float) -> bool:
    """Whether two slots hide their loads, on average over the gaps (MIRAGE, equation 5)."""
    return transfer * (alpha + 2) <= compute * n


def most(
    n: int,
    rotatable: Collection[int],
    transfer: float,
    pass_seconds: float,
    slots: int | None = None,
) -> int:
    """The most layers to lend so that a pass brings no more than it can hide (MIRAGE, 5.3).

    The paper bounds what it calls the number of remapped layers; what takes the link is all m
    rotating ones: m <= floor(pass_seconds / transfer). `slots`: instead of what equation 4 says.
    """
    loads = pass_seconds / transfer * (1 + NEGLIGIBLE) if transfer else inf
    m = floor(min(len(rotatable), loads))
    if slots is None:
        slots = 1 if single(n, m - 1, transfer, pass_seconds / n) else 2
    return max(0, m - slots)


def spread(
    n: int, rotatable: Collection[int], m: int, near: Collection[int] = ()
) -> tuple[int, ...]:
    """`m` of the `rotatable` layers, evenly spaced on the circle of `n` (MIRAGE, 5.4).

    The smallest gap is as large as can be. Of choices as even, the one with most layers of `near`.
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
    """Seconds that a pass waits for layers, in the steady state; exact, not by averages.

    Layers run in order, each when the one before it is done and, if it rotates, its bytes are
    there. A slot's next layer, in the order they are run, is asked for as soon as the last one is
    done, never before, so that none is overwritten unused; one link serves in the order asked.

    Starts and ends are maxima of sums, so a pass maps the state at its beginning (the delay, and
    per slot when its layer will be there) to that at the next one linearly in the (max, +)
    algebra. What a pass takes in the long run is the greatest mean weight of a cycle of that map
    (Karp, Discrete Mathematics 23, 1978), also where waits alternate from pass to pass.
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
    """The plan that lends `alpha` layers: least stall, then fewest loads, then fewest changes.

    Equations 4 and 5 speak of averages, and of two slots used in turn, which an odd m breaks where
    the circle closes. So the timeline decides: between one slot, two, and three, and between sets
    of layers: even ones, those that leave more room where the circle closes, and those made from
    the layers that rotate `now` by adding or removing a few. `slots`: so many, whatever they cost,
    but no more than alpha. None: too few layers can rotate.
    """
    if alpha <= 0:
        return WHOLE
    rotating = set(now.layers)
    period = n * compute + outside
    slack = NEGLIGIBLE * period
    found: tuple[tuple[float, int, int], Rotation] | None = None
    tries = []
    for beta in (min(slots, alpha),) if slots else range(1, min(alpha, MOST_SLOTS) + 1):
        # No order of loads takes less: one link carries them all, and a lone slot's layers run
        # while it stands still.
        a_load = transfer + (compute if beta == 1 else 0.0)
        if alpha + beta <= len(rotatable):
            tries.append((max(0.0, (alpha + beta) * a_load - period), beta))
    for least, beta in sorted(tries):
        if found and (found[0][0] == 0.0 or found[0][0] < least - slack):
            break
        candidates = _candidates(n, rotatable, alpha + beta, beta, outside / compute, now.layers)
        for moved, layers in sorted((len(rotating.symmetric_difference(c)), c) for c in candidates):
            plan = Rotation(layers, beta)
            wait = stall(n, plan, transfer, compute, outside)
            if found and abs(wait - found[0][0]) <= slack:
                wait = found[0][0]
            key = wait, len(layers), moved
            if found is None or key < found[0]:
                found = key, plan
            if wait <= least + slack:
                break
    return found[1] if found else None


def _candidates(
    n: int,
    rotatable: tuple[int, ...],
    m: int,
    beta: int,
    outside: float,
    now: tuple[int, ...],
) -> set[tuple[int, ...]]:
    """Sets of `m` layers of which one may be the best; `outside` in layers."""
    rounds = {n + min(n, floor(outside)), n + min(n, ceil(outside))}
    if m % beta:
        # Where the circle closes two layers in turn have one slot, and one is lost.
        rounds |= {around - 1 for around in rounds}
    found = {grown(n, rotatable, m, now)} if set(now).intersection(rotatable) else set()
    for around in rounds:
        found.update(even(around, tuple(x for x in rotatable if x < around), m))
    return found
