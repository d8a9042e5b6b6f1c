"""What a decision about memory costs: a device's view renewed, and its policy asked.

One device with 20 resident models, 256 running requests, and 32 of them short of a page while none
is free: what a policy is asked in an overload. Each round one model has changed, as after one of
its jobs; nothing that is decided is done, so that all rounds ask alike. One core, presets in turns.
`growth.X` is the exponent of X in a median: 1 is linear. `enough_ms`: where no request is short.
"""

from __future__ import annotations

import gc
import itertools
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import log2
from typing import Any

import numpy as np

from ballast.core.model import ModelSpec
from ballast.core.request import Submission
from ballast.core.view import Shortage
from ballast.engine.state import DeviceState
from ballast.engine.views import device_view
from ballast.policy.presets import PRESETS, resolve
from ballast.sim.cluster import SERVED
from ballast.sim.device import SimDevice
from ballast.sim.model_catalogue import catalogue
from ballast.sim.profile import device_profile
from benchmarks.common import finish, options

MODELS, RUNNING, SHORT = 20, 256, 32
DEVICE, MODEL = "H100-80G", "Qwen3-0.6b"
BUDGET = 72 << 30
PROMPT, OUTPUT, CONTEXT = 300, 2000, 4096
LONGEST = 120.0
"""Virtual seconds in which all requests have begun."""
BUILT_UNDER = {"swap": "recompute"}
"""By preset: another one that brings the device to this point; `swap` has one model there."""
GOAL_MEDIAN_MS, GOAL_P99_MS = 0.2, 1.0


def specs(n: int) -> list[ModelSpec]:
    """Models of one size, each with weights of its own."""
    spec = catalogue()[MODEL].spec(max_model_len=CONTEXT)
    return [replace(spec, name=f"m{i}", fingerprint=f"m{i}") for i in range(n)]


@dataclass
class Overload:
    """A device that is short of pages, and what asking its policy has cost."""

    preset: str
    models: int
    running: int
    short: int
    view_ms: list[float] = field(default_factory=list)
    decide_ms: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        served = specs(self.models)
        settings = replace(SERVED, name="d", budget_bytes=BUDGET)
        self._preset = resolve(self.preset)
        profile = device_profile(DEVICE).of(served)
        before = resolve(BUILT_UNDER.get(self.preset, self.preset))
        self._device = SimDevice(settings, served, before, profile, lambda *_: None)
        for i in range(self.running):
            prompt = tuple((i * 7 + k) % 1000 for k in range(PROMPT))
            self._device.submit(
                Submission(
                    id=f"r{i}",
                    model=f"m{i % self.models}",
                    prompt=prompt,
                    max_tokens=OUTPUT,
                    arrival=1e-3 * i,
                )
            )
        now = 0.0
        while sum(len(m.running) for m in self.state.models.values()) < self.running:
            now += 0.1
            if now > LONGEST:
                raise RuntimeError(f"{self.preset}: not all requests have begun after {LONGEST} s")
            self._device.advance(now)
        self._starve()
        self._next = itertools.cycle(self.state.models.values())
        self._memo: object = None

    @property
    def state(self) -> DeviceState:
        return self._device.state

    def _starve(self) -> None:
        """Nothing is free, and so many running requests lack a block."""
        pool = self.state.pool
        pool.promise(
            "others", pool.free + pool.ledger.reclaiming - pool.ledger.reservations.promised
        )
        models = list(self.state.models.values())
        for i in range(self.short):
            m = models[i % len(models)]
            r = m.running[i // len(models)]
            pages, wanted = m.kv.layout.slab_pages, m.kv.counts.at_hand + 1
            lack = Shortage(m.spec.name, r.id, pages, limited=False, blocks=1, wanted=wanted)
            m.shortages = (*m.shortages, lack)

    def ask(self) -> None:
        """Renew the view after one model has changed, and ask the policy once."""
        next(self._next).last_used = self.state.now
        began = time.perf_counter()
        view = device_view(self.state)
        seen = time.perf_counter()
        self._memo = self._preset.memory(view, self._memo).memo
        decided = time.perf_counter()
        self.view_ms.append(1e3 * (seen - began))
        self.decide_ms.append(1e3 * (decided - seen))


def measured(overloads: Sequence[Overload], rounds: int) -> None:
    """Ask each of them in turns."""
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for overload in overloads:
                overload.ask()
    finally:
        gc.enable()
    for overload in overloads:  # what is not in any cache yet
        del overload.view_ms[: rounds // 10], overload.decide_ms[: rounds // 10]


def main(argv: Sequence[str] | None = None) -> None:
    args = options(__doc__, argv)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    rounds = 100 if args.quick else 1000
    full = [Overload(p, MODELS, RUNNING, SHORT) for p in PRESETS]
    fewer = {
        "models": [Overload(p, MODELS // 2, RUNNING, SHORT) for p in PRESETS],
        "requests": [Overload(p, MODELS, RUNNING // 2, SHORT) for p in PRESETS],
        "shortages": [Overload(p, MODELS, RUNNING, SHORT // 2) for p in PRESETS],
    }
    enough = [Overload(p, MODELS, RUNNING, 0) for p in PRESETS]
    measured([*full, *enough, *itertools.chain(*fewer.values())], rounds)
    views = np.concatenate([o.view_ms for o in full])
    result: dict[str, Any] = {
        "rounds": rounds,
        "decide_ms": {
            o.preset: {
                "median": float(np.median(o.decide_ms)),
                "p99": float(np.quantile(o.decide_ms, 0.99)),
            }
            for o in full
        },
        "enough_ms": {o.preset: float(np.median(o.decide_ms)) for o in enough},
        "view_ms": {
            "median": float(np.median(views)),
            "p99": float(np.quantile(views, 0.99)),
        },
        "growth": {
            what: {
                o.preset: log2(np.median(o.decide_ms) / np.median(half.decide_ms))
                for o, half in zip(full, halves, strict=True)
            }
            for what, halves in fewer.items()
        },
        "view_growth": {
            what: log2(
                np.median(views) / np.median(np.concatenate([half.view_ms for half in halves]))
            )
            for what, halves in fewer.items()
        },
    }
    finish(args, "policy_cost", result)


if __name__ == "__main__":
    main()
