"""What a command line asks a simulation for."""

from __future__ import annotations

from dataclasses import dataclass

from ballast.bench.choose import options_of, slos_of, workload_of
from ballast.bench.sizes import sizes_of
from ballast.core.model import ModelSpec
from ballast.core.settings import FleetSettings
from ballast.policy.presets import resolve
from ballast.workload.workload import Workload

MOST_TOKENS = 4096
"""Of a prompt and its output together, where nothing else is asked for."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A fleet, its models' sizes, a workload for it, and presets to compare."""

    fleet: FleetSettings
    specs: list[ModelSpec]
    workload: Workload
    presets: list[str]

    @classmethod
    def of(
        cls,
        fleet: FleetSettings,
        presets: str | None,
        workload: str,
        rate: float | None,
        seconds: float,
        most_tokens: int | None,
        seed: int,
    ) -> Asked:
        """`presets`: comma separated; None: the fleet's. `most_tokens`, None: `MOST_TOKENS`, or the
        shortest context of any model. Raises ConfigError and WorkloadError."""
        named = [name.strip() for name in presets.split(",")] if presets else [fleet.preset]
        chosen = list(dict.fromkeys(named))
        for name in chosen:
            resolve(name, options_of(fleet, name))
        names = list(slos_of(fleet))
        specs = sizes_of(fleet)
        if most_tokens is None:
            most_tokens = min(MOST_TOKENS, *(spec.max_model_len for spec in specs))
        work = workload_of(
            workload, names, rate=rate, seconds=seconds, most_tokens=most_tokens, seed=seed
        )
        return cls(fleet, specs, work, chosen)

    def described(self) -> str:
        return f"{len(self.workload.requests)} requests: {self.workload.describe()}"
