"""How far the fluid links of simulations are from the live link of a CPU.

Two activations, the loads of a rotation, each asked for a while after the one before has landed,
and KV that goes to the host and comes back, all on one paced link: live
(`memory.transfer.HostLink`) and in virtual time (`sim.link`). Compared are seconds from when a
transfer was asked for to its end, medians over rounds; loads of the rotation are added up.
`error_max`: the largest relative error;
`alone_error_max`: of transfers that have the link to themselves; `load_error_max`: of single loads,
whose neighbours' ends, a few milliseconds sooner or later, can be a good part of them.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

import numpy as np

from ballast.core.clock import VirtualClock
from ballast.core.event import TransferDoneEvent
from ballast.core.link import Direction, LinkRates
from ballast.core.units import MiB
from ballast.live.inbox import MonotonicClock
from ballast.memory.copies import Copy
from ballast.memory.transfer import HostLink
from ballast.sim.event_heap import EventHeap
from ballast.sim.link import SimLink
from benchmarks.common import finish, options

RATES = LinkRates(1e9, 1e9, 6e8, 6e8)
ROUNDS = 9
DOWN, UP = Direction


@dataclass(frozen=True, slots=True)
class Move:
    """A transfer that is asked for at `at`, or so long after another has landed."""

    name: str
    stream: str
    direction: Direction
    n_bytes: int
    at: float
    after: str | None = None


def script() -> list[Move]:
    """What moves; about a second and a half."""
    moves = [
        Move("model a", "activations:a", DOWN, 256 * MiB, 0.0),
        Move("model b", "activations:b", DOWN, 192 * MiB, 0.1),
        Move("kv out", "kv:c", UP, 128 * MiB, 0.15),
        Move("kv in", "kv:c", DOWN, 64 * MiB, 0.02, "kv out"),
        Move("layer 0", "rotation:d", DOWN, 32 * MiB, 0.05),
    ]
    layers = [
        Move(f"layer {i}", "rotation:d", DOWN, 32 * MiB, 0.03, f"layer {i - 1}")
        for i in range(1, 8)
    ]
    return [*moves, *layers]


def alone() -> list[Move]:
    """The same sizes, one after another."""
    found: list[Move] = []
    for n_bytes, direction in ((256, DOWN), (128, UP), (32, DOWN)):
        after = found[-1].name if found else None
        found.append(Move(f"{n_bytes} alone", "s", direction, n_bytes * MiB, 0.05, after))
    return found


class Link(Protocol):
    """What both links have."""

    def start(
        self, transfer_id: int, copies: Sequence[Copy], stream: str, direction: Direction
    ) -> None: ...


def play(
    moves: Sequence[Move],
    link: Link,
    copies: Callable[[Move], list[Copy]],
    now: Callable[[], float],
    wait: Callable[[float | None], list[TransferDoneEvent]],
) -> dict[str, float]:
    """Ask for what is due; by name, the seconds from then to the end. `wait(until)` returns what
    has ended by then, at the latest."""
    due = {m.name: m.at for m in moves if m.after is None}
    asked: dict[str, float] = {}
    took: dict[str, float] = {}
    while len(took) < len(moves):
        for i, m in enumerate(moves):
            if m.name in due and m.name not in asked and due[m.name] <= now():
                asked[m.name] = due[m.name]
                link.start(i, copies(m), m.stream, m.direction)
        left = [at for name, at in due.items() if name not in asked]
        for done in wait(min(left, default=None)):
            name, end = moves[done.transfer_id].name, now()
            took[name] = end - asked[name]
            due |= {m.name: end + m.at for m in moves if m.after == name}
    return took


def virtual(moves: Sequence[Move]) -> dict[str, float]:
    clock = VirtualClock()
    heap = EventHeap(clock)

    def wait(until: float | None) -> list[TransferDoneEvent]:
        return [event for event in heap.take(until) if isinstance(event, TransferDoneEvent)]

    def copies(m: Move) -> list[Copy]:
        return [Copy(0, 0, m.n_bytes)]

    return play(moves, SimLink(heap, clock, RATES), copies, clock.now, wait)


def live(moves: Sequence[Move]) -> dict[str, float]:
    clock = MonotonicClock()
    ended: queue.SimpleQueue[TransferDoneEvent] = queue.SimpleQueue()
    link = HostLink(clock, ended.put, RATES)
    rooms = {m.name: np.ones((2, m.n_bytes), dtype=np.uint8) for m in moves}
    began = clock.now()

    def wait(until: float | None) -> list[TransferDoneEvent]:
        left = None if until is None else max(0.0, began + until - clock.now())
        try:
            return [ended.get(timeout=left)]
        except queue.Empty:
            return []

    def copies(m: Move) -> list[Copy]:
        to, source = rooms[m.name]
        return [Copy(to.ctypes.data, source.ctypes.data, m.n_bytes)]

    try:
        return play(moves, link, copies, lambda: clock.now() - began, wait)
    finally:
        link.close()


def compared(moves: Sequence[Move], rounds: int) -> dict[str, dict[str, float]]:
    """By transfer: seconds in virtual time, the live ones' median and extremes, and the error."""
    expected = virtual(moves)
    seen: dict[str, list[float]] = {m.name: [] for m in moves}
    for _ in range(rounds):
        for name, seconds in live(moves).items():
            seen[name].append(seconds)
    return {
        name: {
            "virtual": expected[name],
            "live": median(found),
            "least": min(found),
            "most": max(found),
            "error": median(found) / expected[name] - 1,
        }
        for name, found in seen.items()
    }


def main(argv: Sequence[str] | None = None) -> None:
    args = options(__doc__, argv)
    rounds = 3 if args.quick else ROUNDS
    together, single = compared(script(), rounds), compared(alone(), rounds)
    loads = [together.pop(name) for name in list(together) if name.startswith("layer")]
    total = {key: sum(load[key] for load in loads) for key in ("virtual", "live")}
    together["rotation"] = {**total, "error": total["live"] / total["virtual"] - 1}
    result: dict[str, Any] = {
        "error_max": max(abs(found["error"]) for found in together.values()),
        "load_error_max": max(abs(load["error"]) for load in loads),
        "alone_error_max": max(abs(found["error"]) for found in single.values()),
        "rounds": rounds,
        "together": together,
        "alone": single,
    }
    finish(args, "sim_links", result)


if __name__ == "__main__":
    main()
