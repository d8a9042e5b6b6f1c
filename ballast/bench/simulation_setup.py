"""Build the inputs of a simulation from its command line: fleet, model sizes, workload, presets.

Used by `ballast simulate`, `ballast plan` and `ballast bench`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ballast.bench.model_sizes import sizes_of
from ballast.bench.run_options import compared_presets, options_of, slos_of, workload_of
from ballast.core.model import ModelSpec
from ballast.core.settings import FleetSettings
from ballast.policy.presets import resolve
from ballast.workload.cuts import CUT
from ballast.workload.workload import Workload

MOST_TOKENS = 4096
"""Default bound on the tokens of a prompt and its output together."""


@dataclass(frozen=True, slots=True)
class WorkloadOptions:
    """Options of a command line that choose a workload; see `workload_of`."""

    workload: str | Sequence[str]
    """One, or several at once."""
    rate: float | None = None
    seconds: float = 600.0
    most_tokens: int | None = None
    """None: `MOST_TOKENS`, or the shortest context of any model; of a trace the latter."""
    seed: int = 0
    start: float = 0.0
    spread: float | None = None
    session_gap: float | None = None
    trace_models: str | None = None
    """Comma separated."""
    context: int = MOST_TOKENS
    """The shortest context of any model."""

    def drawn(self, names: Sequence[str], seed: int) -> Workload:
        """Return the workload for models of these names. Raises ConfigError and WorkloadError."""
        most, models = self.most_tokens, self.trace_models
        return workload_of(
            self.workload,
            names,
            rate=self.rate,
            seconds=self.seconds,
            most_tokens=min(MOST_TOKENS, self.context) if most is None else most,
            most_of_traces=self.context if most is None else most,
            seed=seed,
            start=self.start,
            spread=self.spread,
            session_gap=self.session_gap,
            trace_models=None if models is None else [m.strip() for m in models.split(",")],
        )

    def described(self, work: Workload) -> str:
        """Say in a line what was drawn: requests, rate and what was cut of them first, then what
        they are, and all else that was changed."""
        n = len(work.requests)
        cut = [label for label in work.labels if CUT in label]
        others = tuple(label for label in work.labels if CUT not in label)
        text = f"{n} requests in {self.seconds:g} s, {n / self.seconds:.3g}/s"
        if self.rate is not None and n != round(self.rate * self.seconds):
            text += f" ({self.rate:g}/s were asked for)"
        return f"{'; '.join((text, *cut))}: {replace(work, labels=others).describe()}"


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
        """`presets`: comma separated; None: as `compared_presets`. Raises ConfigError and
        WorkloadError."""
        chosen = compared_presets(fleet, presets)
        for name in chosen:
            resolve(name, options_of(fleet, name))
        specs = sizes_of(fleet)
        wanted = replace(wanted, context=min(spec.max_model_len for spec in specs))
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
        """Say in a line what the workload is."""
        return self.wanted.described(self.workload)
