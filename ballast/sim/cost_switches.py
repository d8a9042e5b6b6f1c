"""Switch single costs of a simulation on or off: mapping calls, copies, spread of job durations.

Used by `sim.cluster` and the options of `ballast simulate`. Costs of jobs and of the link itself
always count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ballast.core.errors import ConfigError
from ballast.fleet.faults import unknown
from ballast.sim.job_spread import NONE, lognormal
from ballast.sim.machine_profile import MachineProfile

COSTS = ("mapping", "copies", "spread")
"""`mapping`: calls that map and unmap pages are the loop's time; `copies`: jobs are slower while
bytes move; `spread`: jobs take longer or shorter than their mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostSwitches:
    """The costs that count: all of a profile, except those `without`."""

    without: tuple[str, ...] = ()
    """Names among `COSTS` that do not count."""
    job_spread: float | None = None
    """Standard deviation of the log of job durations (lognormal), in place of the profile's spread;
    None: the profile's."""
    drift: float = 0.0
    """Share by which the speed of every device goes up and down (`sim.job_spread`)."""
    seed: int = 0
    """Seed of spread and drift."""

    def __post_init__(self) -> None:
        for cost in self.without:
            if cost not in COSTS:
                raise ConfigError("without", cost, unknown(cost, COSTS))
        for key in ("job_spread", "drift"):
            share = getattr(self, key)
            if share is not None and not 0 <= share <= 1:
                raise ConfigError(key, share, "a share, from 0 to 1")

    def of(self, profile: MachineProfile) -> MachineProfile:
        """Return the profile with only the costs that count."""
        spread = replace(profile.spread, drift=self.drift, seed=self.seed)
        if self.job_spread is not None:
            spread = replace(spread, quantiles=lognormal(self.job_spread))
        if "spread" in self.without:
            spread = NONE
        return replace(
            profile,
            pages=None if "mapping" in self.without else profile.pages,
            copies_slow=0.0 if "copies" in self.without else profile.copies_slow,
            spread=spread,
        )


ALL = CostSwitches()


def read_cost_switches(
    without: str | None, job_spread: float | None, drift: float, seed: int = 0
) -> CostSwitches:
    """Build switches from command-line options; `without`: comma-separated names of `COSTS`. Raises
    ConfigError."""
    names: Sequence[str] = [name.strip() for name in (without or "").split(",") if name.strip()]
    return CostSwitches(without=tuple(names), job_spread=job_spread, drift=drift, seed=seed)
