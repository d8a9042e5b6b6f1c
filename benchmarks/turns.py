"""Engines in child processes that run in turns: one computes for a moment, all others stand still.

Memory bandwidth of a shared machine drifts within a minute, and a run takes longer than that. So
each engine's run is cut into slices by stopping the process (SIGSTOP) and continuing it; all see
the same machine. Times are *active* times: a child stamps its tokens with the monotonic clock, and
what it spent stopped is taken out here. A slice costs milliseconds for refilling caches.
"""

from __future__ import annotations

import itertools
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LOAD_SECONDS = 600.0
WAIT_POLICY = "OMP_WAIT_POLICY"


class Broken(RuntimeError):
    """A contestant that ended or answered with an error; the text says why."""


@dataclass(frozen=True)
class Step:
    """One decode step in which every stream got a token."""

    turn: int
    """In which round of turns it ended."""
    seconds: float
    """Active."""


@dataclass(frozen=True)
class Run:
    """One run of some streams, in active seconds."""

    streams: int
    prompt_tokens: int
    """Of all streams."""
    new_tokens: int
    """Of all streams."""
    seconds: float
    prefill: float
    """Until the last stream's first token."""
    steps: tuple[Step, ...]


def users_environment() -> dict[str, str]:
    """Return this process's environment without the wait policy of OpenMP's threads, unless it was
    started with one: `ballast` sets one for itself when it is imported, under which llama.cpp
    decodes less than half as fast."""
    at_start = Path("/proc/self/environ").read_bytes().split(b"\0")
    given = any(pair.startswith(f"{WAIT_POLICY}=".encode()) for pair in at_start)
    return {k: v for k, v in os.environ.items() if given or k != WAIT_POLICY}


class Contestant:
    """A child process that speaks `benchmarks.child`'s protocol; stopped outside its turns."""

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        log: Path,
        python: str = sys.executable,
    ) -> None:
        """Starts it and waits until it has loaded. Raises Broken with the reason if it does not.

        `log` gets what it prints on standard error.
        """
        self.name = name
        with log.open("ab") as err:
            self._process = subprocess.Popen(
                [python, "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=err,
                cwd=ROOT,
                env=users_environment(),
                text=True,
                start_new_session=True,
            )
        self.runs: list[Run] = []
        self._turns: list[tuple[float, float, int]] = []
        """(begin, end, round) of each slice of the run in progress."""
        self._asked: int | None = None
        """Prompt tokens of the run in progress."""
        try:
            answer = self._answer(LOAD_SECONDS)
            if answer is None:
                raise Broken(f"{name}: has not loaded after {LOAD_SECONDS:.0f} s")
        except BaseException:
            self.close()
            raise
        self.facts: dict[str, Any] = answer["ready"]
        self._stop()

    @property
    def busy(self) -> bool:
        return self._asked is not None

    def ask(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> None:
        """Give it a run, to be done in the turns to come."""
        assert not self.busy
        assert self._process.stdin is not None
        document = {"prompts": [list(p) for p in prompts], "new_tokens": new_tokens}
        self._process.stdin.write(json.dumps(document) + "\n")
        self._process.stdin.flush()
        self._turns = []
        self._asked = sum(map(len, prompts))

    def turn(self, seconds: float, number: int = 0) -> Run | None:
        """Let it compute for `seconds`, or until the run is done: then returns that."""
        prompt_tokens = self._asked
        assert prompt_tokens is not None
        begin = time.perf_counter()
        os.killpg(self._process.pid, signal.SIGCONT)
        answer = self._answer(seconds)
        end = self._stop()
        self._turns.append((begin, end, number))
        if answer is None:
            return None
        self._asked = None
        return measured(answer["begun"], answer["times"], self._turns, prompt_tokens)

    def close(self) -> None:
        """End the process."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def __enter__(self) -> Contestant:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _answer(self, seconds: float) -> dict[str, Any] | None:
        """The next line, if it comes within `seconds`."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], seconds)
        if not ready:
            return None
        line = self._process.stdout.readline()
        if not line:
            raise Broken(f"{self.name}: ended with code {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise Broken(f"{self.name}: {answer['error']}")
        return answer

    def _stop(self) -> float:
        """Stop it; returns when that was asked."""
        asked = time.perf_counter()
        os.killpg(self._process.pid, signal.SIGSTOP)
        _, status = os.waitpid(self._process.pid, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            self._process.returncode = os.waitstatus_to_exitcode(status)
            raise Broken(f"{self.name}: ended with code {self._process.returncode}")
        return asked


def measured(
    begun: float,
    times: Sequence[Sequence[float]],
    turns: Sequence[tuple[float, float, int]],
    prompt_tokens: int,
) -> Run:
    """A run of which stream s got token i at `times[s][i]`, of a child that computed in `turns`.

    Steps are those from the last stream's first token to the first stream's last: all decode.
    """

    def active(t: float) -> float:
        return sum(max(0.0, min(t, end) - begin) for begin, end, _ in turns)

    def turn(t: float) -> int:
        return max((n for begin, _, n in turns if begin <= t), default=turns[0][2])

    start = active(begun)
    latest = max(times, key=lambda stream: stream[0])
    last = min(stream[-1] for stream in times)
    stamps = [t for t in latest if t <= last]
    steps = tuple(
        Step(turn(after), active(after) - active(before))
        for before, after in itertools.pairwise(stamps)
    )
    return Run(
        streams=len(times),
        prompt_tokens=prompt_tokens,
        new_tokens=sum(map(len, times)),
        seconds=max(active(stream[-1]) for stream in times) - start,
        prefill=active(latest[0]) - start,
        steps=steps,
    )


def contest(
    contestants: Sequence[Contestant],
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    slices: Mapping[str, float],
    between: Callable[[], object],
    runs: int = 1,
) -> Mapping[str, list[Run]]:
    """`runs` runs of each, in turns of `slices[name]` seconds; `between` comes before each round.

    Slices in proportion to how long a run takes let all end in about the same round.
    """
    taken: dict[str, list[Run]] = {c.name: [] for c in contestants}
    for c in contestants:
        c.ask(prompts, new_tokens)
    number = 0
    while any(c.busy for c in contestants):
        between()
        for c in list(contestants)[:: 1 if number % 2 == 0 else -1]:
            run = c.turn(slices[c.name], number) if c.busy else None
            if run is not None:
                taken[c.name].append(run)
                if len(taken[c.name]) < runs:
                    c.ask(prompts, new_tokens)
        number += 1
    return taken
