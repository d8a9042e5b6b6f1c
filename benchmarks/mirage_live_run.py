"""Serves the requests of `mirage_live`, open loop, and measures what its clients see."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ballast.bench.inprocess import Answer, InProcess
from ballast.bench.record import prompts_of, submission_for, vocabularies_of
from ballast.core.event import FinishedOutput
from ballast.core.request import Submission
from ballast.core.settings import FleetSettings
from ballast.weights.weight_stream import Loads
from ballast.workload.workload import Workload
from benchmarks.mirage_run import Measured

WARM_UP = 3
"""Requests of each model."""
PATIENCE = 120.0
"""Seconds for all answers after the last arrival."""


@dataclass(frozen=True)
class Seen:
    """Of one run."""

    clients: Measured
    lent: float
    """Layers, of all models, on average over its answers' tokens."""

    def summary(self) -> dict[str, float]:
        """As the clients', with the layers lent."""
        return {**self.clients.summary(), "lent": self.lent}


class Served:
    """One device, kept from round to round."""

    def __init__(self, fleet: FleetSettings) -> None:
        self._server = InProcess(fleet)
        device = self._server.device
        device.populate()
        self._prompts = prompts_of(vocabularies_of(device.specs.values()))
        self._models = device.state.models
        self._runs = itertools.count()
        self._server.listen = self._hear
        self._lent: list[int] = []
        self._server.__enter__()
        self._warm_up()

    def run(self, workload: Workload) -> Seen:
        """All of it, until everything is answered."""
        run, server = next(self._runs), self._server
        made = [submission_for(r, self._prompts(r)) for r in workload.requests]
        made = [replace(s, id=f"{run}-{s.id}") for s in made]
        before = self._counts()
        self._lent.clear()
        origin = server.now
        due = [origin + r.at for r in workload.requests]
        for at, submission in zip(due, made, strict=True):
            time.sleep(max(0.0, at - server.now))
            server.submit(submission)
        assert server.wait(PATIENCE), "requests are not answered"
        answers = [server.answers.pop(s.id) for s in made]
        preemptions, n, n_bytes, copying, stalled = np.subtract(self._counts(), before).tolist()
        loads = Loads(int(n), int(n_bytes), copying, stalled)
        return Seen(measured(due, answers, int(preemptions), loads), float(np.mean(self._lent)))

    def close(self) -> None:
        self._server.__exit__(None, None, None)

    def _hear(self, now: float, output: object) -> None:
        """On the loop's thread."""
        self._lent.append(sum(m.weights.slots.rotation.n_freed for m in self._models.values()))

    def _warm_up(self) -> None:
        """So that what jobs take is known, and what a first time makes is made."""
        for name, m in self._models.items():
            prompt = tuple(i * 13 % m.spec.vocab for i in range(32))
            asked = [
                Submission(
                    id=f"warm-{name}-{i}", model=name, prompt=prompt, max_tokens=8, ignore_eos=True
                )
                for i in range(WARM_UP)
            ]
            self._server.generate(asked)

    def _counts(self) -> tuple[float, ...]:
        """Since start, of all models: preemptions, and of loads their number, bytes, seconds of
        copying, seconds waited."""
        models = self._server.device.snapshot().models
        keys = ("preemptions", "loads", "loaded_bytes", "copy_seconds", "stall_seconds")
        return tuple(sum(getattr(m, key) for m in models) for key in keys)


def measured(
    due: Sequence[float], answers: Sequence[Answer], preemptions: int, loads: Loads
) -> Measured:
    """What the clients of requests saw that were to be sent at `due`."""
    failed = [a.end for a in answers if not isinstance(a.end, FinishedOutput)]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(answers)} requests were not served: {failed[0]}")
    answered = list(zip(due, answers, strict=True))
    return Measured(
        arrived=tuple(at for at, _ in answered),
        times=tuple(np.array(a.times) for _, a in answered),
        requests=len(answers),
        preemptions=preemptions,
        loads=loads,
    )
