"""Build the inputs of a simulation from its command line: fleet, model sizes, workload, presets.

Used by `ballast simulate`, `ballast plan` and `ballast bench`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ballast.bench.model_sizes import sizes_of
from ballast.bench.run_options import options_of, slos_of, workload_of
from ballast.core.model import ModelSpec
from ballast.core.settings import FleetSettings
from ballast.policy.presets import resolve
from ballast.workload.workload import Workload

MOST_TOKENS = 4096
"""Default bound on the tokens of a prompt and its output together."""


@dataclass(frozen=True, slots=True)
class WorkloadOptions:
    """Options of a command line that choose a workload; see `workload_of`."""

    workload: str
    rate: float | None = None
    seconds: float = 600.0
    most_tokens: int | None = None
    """None: `MOST_TOKENS`, or the shortest context of any model."""
    seed: int = 0
    start: float = 0.0
    spread: float | None = None

    def drawn(self, names: Sequence[str], seed: int) -> Workload:
        """Return the workload for models of these names. Raises ConfigError and WorkloadError."""
        return workload_of(
            self.workload,
            names,
            rate=self.rate,
            seconds=self.seconds,
            most_tokens=MOST_TOKENS if self.most_tokens is None else self.most_tokens,
            seed=seed,
            start=self.start,
            spread=self.spread,
        )


@dataclass(frozen=True, slots=True)
class SimulationSetup:
    """A fleet, its models' sizes, a workload for it, and presets to compare."""

    fleet: FleetSettings
    specs: list[ModelSpec]
    workload: Workload
    presets: list[str]
    wanted: WorkloadOptions

    @classmethod
    def of(
        cls, fleet: FleetSettings, presets: str | None, wanted: WorkloadOptions
    ) -> SimulationSetup:
        """`presets`: comma separated; None: the fleet's. Raises ConfigError and WorkloadError."""
        named = [name.strip() for name in presets.split(",")] if presets else [fleet.preset]
        chosen = list(dict.fromkeys(named))
        for name in chosen:
            resolve(name, options_of(fleet, name))
        specs = sizes_of(fleet)
        if wanted.most_tokens is None:
            shortest = min(MOST_TOKENS, *(spec.max_model_len for spec in specs))
            wanted = replace(wanted, most_tokens=shortest)
        work = wanted.drawn(list(slos_of(fleet)), wanted.seed)
        return cls(fleet, specs, work, chosen, wanted)

    def draws(self, n: int) -> list[Workload]:
        """The workload, and up to `n` - 1 others that differ by chance alone, by the seeds that
        follow; the workload by itself where nothing in it is drawn."""
        names = list(slos_of(self.fleet))
        found = [self.workload]
        for seed in range(self.wanted.seed + 1, self.wanted.seed + n):
            other = self.wanted.drawn(names, seed)
            if other.requests == self.workload.requests:
                break
            found.append(other)
        return found

    def described(self) -> str:
        return f"{len(self.workload.requests)} requests: {self.workload.describe()}"
