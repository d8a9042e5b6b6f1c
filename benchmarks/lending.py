"""Pages lent between two worker processes, 10^4 times, with borrowers and lenders that die amid.

A cycle: one worker lends some of its pages, the other maps and writes on some of what it has, and
pages of any lease are asked back; between, both use pages of their own, and return others unasked.
In one of a hundred cycles the borrower is killed: at any moment, or because it does not answer a
recall (it keeps writing on the pages until it is dead, and they are used at once after that). Each
page carries a stamp by owner and generation. After every change both workers compare ledgers,
leases, /proc/self/maps and all stamps, those of lent pages also as the lender's memfd has them.
With `--gpus 0 1` each worker has the memory of one of two GPUs, of which each can use the other's
in place, and the driver is asked instead of Linux.

- `leaked_pages`: not free at the end, or after their borrower's death; `leaked_memories`: devices
  of dead workers that the other still has open or mapped, of GPUs pages that it still has without
  a lease. Goal 0.
- `corrupted`: stamps that were wrong; `os_disagreements`: checks in which Linux (or the driver) and
  ledger differ.
- `stale_refused` of `stale`: messages of dead leases that were delivered late.
- `us`: microseconds a page by pages a call, medians: `lend` (with accepting), `map`, `touch` (all
  of it), `recall` (with unmapping what was written and taking it back), without messages;
  `recall_trip_us`: a whole recall between the processes, messages passed on by a third. On GPUs
  accepting includes the descriptors' way and their import.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import Any

import msgspec

from ballast.core.lease import PagesReturnedEvent
from ballast.core.units import KiB, MiB
from benchmarks import lending_worker
from benchmarks.common import finish, options
from benchmarks.lending_worker import decode

NAMES = ("a", "b")
PAGE, N_PAGES = 16 * KiB, 48
TIMED_PAGE, TIMED_PAGES = 256 * KiB, 128
GPU_PAGE = 2 * MiB
BATCHES = (1, 16, 64)
ROUNDS = 200
KILL_SHARE = 0.01


Run = Callable[[Connection, str, int, int, int | None], None]


class Failed(Exception):
    """A worker said that something does not hold."""


class Child:
    """A worker process, and what is asked of it."""

    def __init__(
        self,
        context: ForkServerContext,
        name: str,
        page: int,
        n_pages: int,
        gpu: int | None,
        run: Run,
    ) -> None:
        self.name = name
        self._pipe, theirs = context.Pipe()
        arguments = (theirs, name, page, n_pages, gpu)
        self._process = context.Process(target=run, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def tell(self, command: str, *arguments: Any) -> None:
        self._pipe.send_bytes(msgspec.msgpack.encode([command, *arguments]))

    def hear(self) -> Any:
        done, answer = msgspec.msgpack.decode(self._pipe.recv_bytes())
        if not done:
            raise Failed(answer)
        return answer

    def ask(self, command: str, *arguments: Any) -> Any:
        self.tell(command, *arguments)
        return self.hear()

    def kill(self) -> None:
        """Returns when the process has been reaped: its mappings are gone."""
        self._process.kill()
        self._process.join()
        self._pipe.close()


class Pair:
    """Two workers, the one that supervises them, and what it knows of every page in use."""

    def __init__(
        self,
        context: ForkServerContext,
        page: int,
        n_pages: int,
        gpus: Sequence[int] | None = None,
        run: Run = lending_worker.run,
    ) -> None:
        """`gpus`: one each; None: CPUs. `run`: what the processes do."""
        self._context, self._page, self.n_pages, self._run = context, page, n_pages, run
        self._gpus: Mapping[str, int] = dict(zip(NAMES, gpus or (), strict=False))
        self.addresses: dict[str, str] = {}
        self.workers = {name: self._child(name) for name in NAMES}
        self.epoch = 0
        self.stamps: dict[str, dict[int, int]] = {name: {} for name in NAMES}
        """Device -> page -> what it is filled with."""
        self.meet()

    def _child(self, name: str) -> Child:
        arguments = (self._page, self.n_pages, self._gpus.get(name), self._run)
        child = Child(self._context, name, *arguments)
        self.addresses[name] = child.ask("address")
        return child

    def other(self, name: str) -> str:
        return NAMES[1 - NAMES.index(name)]

    def meet(self) -> None:
        self.epoch += 1
        for name in NAMES:
            peer = self.other(name)
            self.workers[name].ask("meet", peer, self.epoch, self.addresses[peer])

    def deliver(self, to: str, data: bytes) -> str | None:
        """With all that it leads to; why it was refused."""
        received = self.workers[to].ask("hear", data)
        message = decode(data)
        if isinstance(message, PagesReturnedEvent) and received["refused"] is None:
            for page in message.lease.pages:
                self.stamps[to].pop(page, None)
        for answer in received["answers"]:
            self.deliver(self.other(to), answer)
        refused: str | None = received["refused"]
        return refused

    def replace(self, name: str) -> int:
        """Kill a worker, tell the other, start another: pages that the dead one had borrowed."""
        survivor = self.workers[self.other(name)]
        self.workers[name].kill()
        freed: int = survivor.ask("gone", name, self.epoch)
        self.stamps[name].clear()
        return freed

    def renew(self, name: str) -> None:
        self.workers[name] = self._child(name)
        self.meet()

    def close(self) -> None:
        for worker in self.workers.values():
            worker.kill()


class Cycles:
    """The random run."""

    def __init__(self, pair: Pair, seed: int, kill_share: float = KILL_SHARE) -> None:
        self._pair, self._random = pair, random.Random(seed)
        self._kill_share = kill_share
        self._stamp = 1
        self._now = 0.0
        self._late: list[tuple[str, bytes]] = []
        """(receiver, message) of dead leases."""
        self.counts: Counter[str] = Counter()
        self.trips: list[float] = []
        self.kill_seconds: list[float] = []

    def run(self, cycles: int) -> None:
        for _ in range(cycles):
            self._cycle()
        self._clean_up()

    def _cycle(self) -> None:
        lender = self._random.choice(NAMES)
        borrower = self._pair.other(lender)
        self._own(self._random.choice(NAMES))
        lent = self._pair.workers[lender].ask("lend", borrower, self._random.randint(1, 8))
        if lent is not None:
            assert self._pair.deliver(borrower, lent) is None
            self._count("lend")
        self._use(lender, borrower)
        if self._random.random() < self._kill_share:
            self._kill(lender, borrower)
        else:
            self._recall(lender, borrower)

    def _count(self, what: str) -> None:
        self.counts[what] += 1
        self._check()

    def _own(self, name: str) -> None:
        worker, stamps = self._pair.workers[name], self._pair.stamps[name]
        if self._random.random() < 0.5:
            n = self._random.randint(1, 6)
            stamps.update(worker.ask("own", n, self._stamp))
            self._stamp += n
        else:
            for page in worker.ask("disown", self._random.randint(1, 8)):
                del stamps[page]

    def _use(self, lender: str, borrower: str) -> None:
        worker = self._pair.workers[borrower]
        n = self._random.randint(1, 8)
        used = worker.ask("use", n, self._stamp)
        self._stamp += n
        self._pair.stamps[lender].update(used)
        if used:
            self._count("use")
        chance = self._random.random()
        if chance < 0.1:
            worker.ask("unuse", self._random.randint(1, 4))
        elif chance < 0.2:
            for answer in worker.ask("offer_back", lender, self._random.randint(1, 4)):
                assert self._pair.deliver(lender, answer) is None
                self._count("offer_back")

    def _recall(self, lender: str, borrower: str, n: int | None = None) -> bool:
        which, skip = self._random.randrange(1000), self._random.randrange(1000)
        n = self._random.randint(1, 12) if n is None else n
        start = time.perf_counter()
        arguments = (borrower, which, 0 if n > self._pair.n_pages else skip, n, self._now + 1.0)
        asked = self._pair.workers[lender].ask("recall", *arguments)
        if asked is None:
            return False
        assert self._pair.deliver(borrower, asked) is None
        self.trips.append(time.perf_counter() - start)
        self._count("recall")
        return True

    def _kill(self, lender: str, borrower: str) -> None:
        """The borrower, which may be a lender as well."""
        survivor, victim = self._pair.workers[lender], self._pair.workers[borrower]
        if self._random.random() < 0.5:
            self.counts["deaf"] += 1
            victim.ask("go_deaf")
            asked = survivor.ask("recall", borrower, 0, 0, 8, self._now + 1.0)
            if asked is not None:
                assert self._pair.deliver(borrower, asked) is None
                assert survivor.ask("overdue", self._now + 0.5) == []
                self._now += 2.0
                assert survivor.ask("overdue", self._now) == [[borrower, self._pair.epoch]]
        else:
            # What it said last arrives when it is dead; what it was to be told reaches its heir.
            self._late = [(lender, outcome) for outcome in victim.ask("offer_back", lender, 4)]
            lent = survivor.ask("lend", borrower, 1)
            self._late += [] if lent is None else [(borrower, lent)]
            lent = victim.ask("lend", lender, 1)
            self._late += [] if lent is None else [(lender, lent)]
        start = time.perf_counter()
        freed = self._pair.replace(borrower)
        self.kill_seconds.append(time.perf_counter() - start)
        self.counts["pages_of_the_killed"] += freed
        outcome = survivor.ask("check", [])
        self.counts["leaked"] += (
            self._pair.n_pages - outcome["free"] - outcome["own"] + outcome["borrowed"]
        )
        mine = dict(survivor.ask("own", outcome["free"], self._stamp))
        self._stamp += outcome["free"]
        self._pair.stamps[lender] = {
            page: stamp for page, stamp in self._pair.stamps[lender].items() if page not in mine
        } | mine
        self._pair.renew(borrower)
        for receiver, message in self._late:
            self.counts["stale"] += 1
            self.counts["stale_refused"] += self._pair.deliver(receiver, message) is not None
        self._late.clear()
        self._count("kill")

    def _check(self) -> None:
        """Both at once."""
        for name, worker in self._pair.workers.items():
            worker.tell("check", list(self._pair.stamps[name].items()))
        for worker in self._pair.workers.values():
            outcome = worker.hear()
            self.counts["checks"] += 1
            self.counts["corrupted"] += outcome["corrupted"]
            self.counts["disagreements"] += outcome["disagreements"]
            self.counts["memories"] = max(self.counts["memories"], outcome["strangers"])

    def _clean_up(self) -> None:
        """Everything is asked back, everything is given back: all pages are free, or leaked."""
        for name in NAMES:
            while self._recall(name, self._pair.other(name), self._pair.n_pages + 1):
                pass
            self._pair.workers[name].ask("disown", self._pair.n_pages)
            self._pair.stamps[name].clear()
        for worker in self._pair.workers.values():
            outcome = worker.ask("check", [])
            self.counts["leaked"] += self._pair.n_pages - outcome["free"] + outcome["borrowed"]


def costs(pair: Pair, rounds: int) -> dict[str, dict[str, float]]:
    """Microseconds a page, by pages a call; ends the workers."""
    a, b = (pair.workers[name] for name in NAMES)
    steps = {
        "lend": ((a, "lend"), (b, "accept")),
        "map": ((b, "map"),),
        "touch": ((b, "touch"),),
        "recall": ((a, "ask_back"), (b, "unmap"), (a, "take_back")),
    }
    found: dict[str, dict[str, float]] = {}
    for n in BATCHES:
        taken: dict[str, list[float]] = {step: [] for step in steps}
        for _ in range(rounds):
            message = b""
            for step, calls in steps.items():
                seconds = 0.0
                for worker, call in calls:
                    peer = pair.other(worker.name)
                    spent, answer = worker.ask("cost", peer, call, message, n)
                    seconds += spent
                    message = answer or message
                taken[step].append(seconds / n * 1e6)
        found[str(n)] = {step: statistics.median(values) for step, values in taken.items()}
    pair.close()
    return found


def main(argv: Sequence[str] | None = None) -> None:
    def extra(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--cycles", type=int, default=None)
        parser.add_argument("--seed", type=int, default=0)
        parser.add_argument("--gpus", type=int, nargs=2, default=None, metavar="N")

    args = options(__doc__, argv, extra)
    cycles = args.cycles or (500 if args.quick else 10_000)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.lending_worker"])
    timed_page, page = (TIMED_PAGE, PAGE) if args.gpus is None else (GPU_PAGE, GPU_PAGE)
    us = costs(Pair(context, timed_page, TIMED_PAGES, args.gpus), ROUNDS)
    pair = Pair(context, page, N_PAGES, args.gpus)
    run = Cycles(pair, args.seed)
    start = time.perf_counter()
    run.run(cycles)
    seconds = time.perf_counter() - start
    pair.close()
    counts = run.counts
    result: dict[str, Any] = {
        "cycles": cycles,
        "seed": args.seed,
        "leaked_pages": counts["leaked"],
        "leaked_memories": counts["memories"],
        "corrupted": counts["corrupted"],
        "os_disagreements": counts["disagreements"],
        "stale": counts["stale"],
        "stale_refused": counts["stale_refused"],
        "checks": counts["checks"],
        "lends": counts["lend"],
        "uses": counts["use"],
        "recalls": counts["recall"],
        "kills": counts["kill"],
        "kills_for_silence": counts["deaf"],
        "pages_of_the_killed": counts["pages_of_the_killed"],
        "us": us,
        "timed_page_bytes": timed_page,
        "gpus": args.gpus,
        "recall_trip_us": statistics.median(run.trips) * 1e6,
        "kill_ms": statistics.median(run.kill_seconds) * 1e3 if run.kill_seconds else 0.0,
        "seconds": seconds,
    }
    finish(args, "lending", result)


if __name__ == "__main__":
    main()
