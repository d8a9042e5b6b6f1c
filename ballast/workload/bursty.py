"""Generate bursty workloads: many models, a quickly changing few of them in use (Prism 3, A.1).

The paper's four production traces are not public. Its statistics of them: 23-50 % of the models are
active at a time (a request within two minutes), 54-766 changes of the active set per hour, many
models with 40-100 idle intervals of more than 10 s per hour and with a CV of requests per minute
above 1, a few models in almost every group and a long tail used sporadically, each on its own.

Here every model alternates between *spells* (it is in use) and pauses; within a spell requests come
in clumps. The head is always in a spell. Spells are exponential, pauses hyper-exponential (most
short, some long), gaps between clumps exponential, clump sizes geometric, and each spell has an
intensity of its own, so that a model's past says little about its next spell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ballast.workload.generators import Floats, assemble, power_law
from ballast.workload.lengths import CHAT_OUTPUT, CHAT_PROMPT, LengthSampler
from ballast.workload.workload import Workload, WorkloadError


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstyGroups:
    """Knobs; the defaults meet the paper's statistics for 16 to 129 models.

    Changes of the active set grow with the number of models: about 5.6 per hour and tail model.
    Fewer models need shorter spells and pauses (and so more changes each) to reach 54 per hour.
    """

    head: float = 0.25
    """Share of the models that are always in use, rounded, at least one model."""
    spell_seconds: float = 200.0
    """Mean spell of a tail model."""
    pause_seconds: float = 1000.0
    """Mean pause of a tail model."""
    clump_gap_seconds: float = 16.0
    """Mean time between clumps within a spell."""
    clump_requests: float = 3.0
    """Mean requests per clump, over the models; 1 or more."""
    within_seconds: float = 0.5
    """Mean gap within a clump."""
    alpha: float = 0.6
    """Power law of clump sizes over the models, the head first."""
    intensity_sigma: float = 0.8
    """Log-normal spread of clump sizes between spells."""

    def __post_init__(self) -> None:
        for key in ("spell_seconds", "pause_seconds", "clump_gap_seconds", "within_seconds"):
            value = getattr(self, key)
            if not 0 < value < float("inf"):
                raise WorkloadError(f"{key}: {value!r}: seconds, above 0")
        if not 0 <= self.head <= 1:
            raise WorkloadError(f"head: {self.head!r}: 0 to 1")
        if not 1 <= self.clump_requests < float("inf"):
            raise WorkloadError(f"clump_requests: {self.clump_requests!r}: >= 1")
        if not (self.alpha >= 0 and self.intensity_sigma >= 0):
            raise WorkloadError("alpha and intensity_sigma must be 0 or more")


def bursty_groups(
    names: Sequence[str],
    seconds: float,
    *,
    groups: BurstyGroups | None = None,
    prompt: LengthSampler = CHAT_PROMPT,
    output: LengthSampler = CHAT_OUTPUT,
    seed: int = 0,
) -> Workload:
    """A workload over [0, seconds); `names` go from the head to the tail.

    To change its rate without changing who is active when, change `clump_requests`;
    `Workload.scale_rate` also speeds up the coming and going of models.
    """
    knobs = groups or BurstyGroups()
    if not names or not 0 < seconds < float("inf"):
        raise WorkloadError(f"no bursty groups of {len(names)} models for {seconds!r} seconds")
    head = max(1, round(knobs.head * len(names)))
    arrivals = []
    for place, share in enumerate(power_law(len(names), knobs.alpha)):
        rng = np.random.default_rng([seed, place])
        size = max(1.0, knobs.clump_requests * share * len(names))
        spells = _spells(knobs, seconds, place < head, rng)
        times = [_requests(knobs, begin, end, size, rng) for begin, end in spells]
        drawn = np.sort(np.concatenate(times)) if times else np.empty(0)
        arrivals.append(drawn[drawn < seconds])
    source = f"generated: bursty groups, {head} of {len(names)} models always in use, seed {seed}"
    return assemble("bursty-groups", names, arrivals, prompt, output, seed, source)


def _spells(
    knobs: BurstyGroups, seconds: float, always: bool, rng: np.random.Generator
) -> list[tuple[float, float]]:
    """Intervals in which a model is in use. A head model's spells follow on each other."""
    spells = []
    share = knobs.spell_seconds / (knobs.spell_seconds + knobs.pause_seconds)
    at = 0.0 if always or rng.random() < share else _pause(knobs, rng) * rng.random()
    while at < seconds:
        end = at + rng.exponential(knobs.spell_seconds)
        spells.append((at, min(end, seconds)))
        at = end + (0.0 if always else _pause(knobs, rng))
    return spells


def _pause(knobs: BurstyGroups, rng: np.random.Generator) -> float:
    """Hyper-exponential: three in four short (half the mean), one long (2.5 times the mean)."""
    return rng.exponential(knobs.pause_seconds * (0.5 if rng.random() < 0.75 else 2.5))


def _requests(
    knobs: BurstyGroups, begin: float, end: float, size: float, rng: np.random.Generator
) -> Floats:
    """Requests of one spell, not sorted; the last clump may run beyond its end."""
    sigma = knobs.intensity_sigma
    mean = max(1.0, size * rng.lognormal(-sigma * sigma / 2, sigma))
    starts = [begin]
    while (start := starts[-1] + rng.exponential(knobs.clump_gap_seconds)) < end:
        starts.append(start)
    sizes = rng.geometric(1 / mean, len(starts))
    clumps = [
        start + np.cumsum(rng.exponential(knobs.within_seconds, n)) - knobs.within_seconds
        for start, n in zip(starts, sizes, strict=True)
    ]
    return np.maximum(np.concatenate(clumps), begin)
