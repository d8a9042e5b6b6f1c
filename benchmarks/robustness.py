"""Attacks on a server: for each what is expected, and what is seen.

A fleet of tiny random models in `ballast serve`, with keys. While clients and checkpoints mean it
harm, a witness in a process of its own probes `/live` and reads streams of a model that nobody
attacks. Nothing is expected of how fast an attack is answered, only of what others notice: time,
memory, errors. What one answer or exit code shows of an attack is tried by the tests. Who attacks
would have a machine of his own: here his threads run at a lower priority than the server.

- `failed`: attacks of which something else was seen than expected (goal 0).
- `attacks`: each with `expected`, `seen`, `ok` and `seconds`.
- `quiet`: what the witness sees of a server that nobody attacks: on a machine that is busy with
  other things, what it sees in an attack says nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ballast.bench.server_process import serving
from benchmarks.common import finish, options
from benchmarks.resident import Memory, resident_mib
from benchmarks.robustness_clients import CLIENT_ATTACKS
from benchmarks.robustness_models import MODEL_ATTACKS
from benchmarks.robustness_target import (
    VICTIM,
    VICTIM_KEY,
    Target,
    make_target_fleet,
)
from benchmarks.witness import Seen, WitnessProcess, witness

LIVE_SECONDS, GAP_SECONDS = 0.1, 0.25
"""Goals: the longest that `/live` may take, and the longest between two tokens of a stream."""
GROWTH_MIB = 256
"""What an attack may add to the resident memory of all processes together, at its peak."""
QUIET_SECONDS = 5.0
SETTLING_SECONDS, SETTLING_ROUNDS, STILL_MIB = 2.0, 15, 2.0
"""Memory of a server that has started changes by less in one round."""
AFTER_SECONDS = 0.5
NICENESS = 10
"""Of the threads that attack."""
SAMPLE_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Attack:
    """One thing that must not hurt. `run` returns what was seen of it; raises AssertionError with
    that where it is not as expected."""

    name: str
    expected: str
    run: Callable[[Target], str]


ATTACKS = tuple(Attack(*attack) for attack in (*CLIENT_ATTACKS, *MODEL_ATTACKS))


def attempt(attack: Attack, target: Target, by: WitnessProcess) -> dict[str, Any]:
    """The result of one attack."""
    began = time.perf_counter()
    with Memory(target.processes, SAMPLE_SECONDS) as memory:
        before = memory.now()
        by.begin()
        try:
            with ThreadPoolExecutor(1, initializer=_yield_to_server) as attacker:
                seen, ok = attacker.submit(attack.run, target).result(), True
        except AssertionError as error:
            seen, ok = str(error), False
        except Exception as error:  # noqa: BLE001  whatever it is, the next attack is to be tried
            seen, ok = f"{type(error).__name__}: {error!s:.300}", False
        time.sleep(AFTER_SECONDS)
        noticed, peak = by.end(), memory.peak()
        grown = {name: mib - before[name] for name, mib in peak.items()}
    seconds = time.perf_counter() - began
    ok = ok and unhurt(noticed) and sum(grown.values()) < GROWTH_MIB
    return {
        "attack": attack.name,
        "expected": attack.expected,
        "seen": seen,
        "ok": ok,
        "seconds": seconds,
        "live_s": noticed.live,
        "gap_s": noticed.gap,
        "grown_mib": sum(grown.values()),
        "grown_mib_of": grown,
        "errors": noticed.errors[:3],
        "server": target.pid,
    }


def _yield_to_server() -> None:
    """Lower the priority of this thread, and of what it starts."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def unhurt(seen: Seen) -> bool:
    """Whether a witness noticed nothing that it must not."""
    slow = seen.live > LIVE_SECONDS or seen.gap > GAP_SECONDS
    return not slow and not seen.errors and seen.probes > 0 and seen.tokens > 0


@contextmanager
def attacked(directory: Path) -> Iterator[tuple[Target, WitnessProcess]]:
    """A server of its own fleet, in a directory that is not there yet, and a witness of it."""
    file = make_target_fleet(directory)
    with (
        serving(file, "--log-level", "error") as running,
        witness(running.url, VICTIM_KEY, VICTIM) as by,
    ):
        target = Target(running.url, running.pid, file)
        settle(target)
        yield target, by


def settle(target: Target) -> None:
    """Wait until the server's processes have loaded their libraries, a spare worker's last: what
    they take for these is not an attack's."""
    before = -STILL_MIB
    for _ in range(SETTLING_ROUNDS):
        now = sum(resident_mib(pid) for pid in target.processes.values())
        if abs(now - before) < STILL_MIB:
            return
        before = now
        time.sleep(SETTLING_SECONDS)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The result."""
    left = [a for a in ATTACKS if args.only in a.name]
    found: list[dict[str, Any]] = []
    quiet = Seen()
    with tempfile.TemporaryDirectory() as scratch:
        while left:
            # What an attack has left behind where it failed must not count against the next one.
            with attacked(Path(scratch) / f"fleet-{len(found)}") as (target, by):
                if not found:
                    by.begin()
                    time.sleep(QUIET_SECONDS)
                    quiet = by.end()
                while left and (not found or found[-1]["ok"] or found[-1]["server"] != target.pid):
                    found.append(attempt(left.pop(0), target, by))
                    print(line(found[-1]), flush=True)
    return {
        "failed": sum(not a["ok"] for a in found),
        "tried": len(found),
        "quiet": {"live_s": quiet.live, "gap_s": quiet.gap, "load": os.getloadavg()[0]},
        "attacks": found,
    }


def line(result: dict[str, Any]) -> str:
    """One attack's result, as it is printed while others are still to come."""
    noticed = f"/live {result['live_s']:.3f} s, gap {result['gap_s']:.3f} s"
    errors = "".join(f"; {error}" for error in result["errors"])
    mark = "ok    " if result["ok"] else "FAILED"
    grown = f"{result['grown_mib']:+.0f} MiB"
    return f"{mark} {result['attack']}: {result['seen']} ({noticed}, {grown}{errors})"


def main(argv: Sequence[str] | None = None) -> int:
    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--only", default="", help="attacks with this in their name")

    args = options(__doc__, argv, more)
    result = measure(args)
    finish(args, "robustness", result)
    return 1 if result["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
