"""Generate synthetic workloads: Poisson or gamma arrivals, power-law popularity of models.

The same arguments and seed give the same requests. Every model draws from a generator of its own,
seeded with (seed, index of the model), so adding a model at the end leaves the others' requests as
they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ballast.workload.lengths import CHAT_OUTPUT, CHAT_PROMPT, LengthSampler
from ballast.workload.workload import Workload, WorkloadError, WorkloadRequest

Floats = NDArray[np.float64]


def power_law(n: int, alpha: float) -> tuple[float, ...]:
    """Shares of `n` models, the most popular first: rank ** -alpha, normalised (MuxServe 4.2).

    The paper's "alpha = 0.9 (2.1): 20 % of models get 50 % (90 %) of the requests" holds for 19
    models of which 4 count as 20 %; the share depends on `n`.
    """
    if n < 1 or not 0 <= alpha < float("inf"):
        raise WorkloadError(f"no popularity of {n!r} models with alpha {alpha!r}")
    weights = np.arange(1, n + 1, dtype=np.float64) ** -alpha
    return tuple((weights / weights.sum()).tolist())


def poisson(rate: float, seconds: float, rng: np.random.Generator) -> Floats:
    """(n,) ascending arrival times in [0, seconds) at `rate` per second."""
    _check_rate(rate, seconds)
    times: Floats = np.sort(rng.uniform(0, seconds, rng.poisson(rate * seconds)))
    return times


def gamma(rate: float, cv: float, seconds: float, rng: np.random.Generator) -> Floats:
    """(n,) ascending arrival times in [0, seconds) with Gamma gaps of mean 1/rate and given CV.

    cv 1 is Poisson, above 1 bursty, 0 even. The first gap is cut at a random point of itself.
    """
    _check_rate(rate, seconds)
    if not 0 <= cv < float("inf"):
        raise WorkloadError(f"cv: {cv!r}: 0 or more")
    shape = 1 / cv**2 if cv > 0 else float("inf")
    times: list[Floats] = []
    at = 0.0
    while at < seconds:
        n = int(rate * (seconds - at)) + 16
        gaps = rng.gamma(shape, 1 / (rate * shape), n) if cv > 0 else np.full(n, 1 / rate)
        if not times:
            gaps[0] *= rng.random()
        times.append(at + np.cumsum(gaps))
        at = float(times[-1][-1])
    drawn = np.concatenate(times)
    return drawn[drawn < seconds]


def independent(
    names: Sequence[str],
    rate: float,
    seconds: float,
    *,
    alpha: float = 0.9,
    cv: float = 1.0,
    prompt: LengthSampler = CHAT_PROMPT,
    output: LengthSampler = CHAT_OUTPUT,
    seed: int = 0,
) -> Workload:
    """Generate independent models: Gamma gaps, shares of `rate` by power law.

    `names` go from the most popular to the least.
    """
    arrivals = []
    for place, share in enumerate(power_law(len(names), alpha)):
        rng = np.random.default_rng([seed, place])
        arrivals.append(gamma(rate * share, cv, seconds, rng))
    source = f"generated: {rate:g}/s for {seconds:g} s, power law {alpha:g}, CV {cv:g}, seed {seed}"
    return assemble("independent", names, arrivals, prompt, output, seed, source)


def assemble(
    name: str,
    names: Sequence[str],
    arrivals: Sequence[Floats],
    prompt: LengthSampler,
    output: LengthSampler,
    seed: int,
    source: str,
) -> Workload:
    """A workload of arrival times per model, lengths drawn per model; ids in order of arrival."""
    drawn: list[tuple[float, int, int, int]] = []
    for place, times in enumerate(arrivals):
        rng = np.random.default_rng([seed, place, 1])
        columns = (times, prompt.sample(rng, len(times)), output.sample(rng, len(times)))
        for at, p, o in zip(*(c.tolist() for c in columns), strict=True):
            drawn.append((at, place, p, o))
    requests = (
        WorkloadRequest(id=n, at=at, model=names[place], prompt_tokens=p, output_tokens=o)
        for n, (at, place, p, o) in enumerate(sorted(drawn))
    )
    labels = (f"prompt tokens {prompt}", f"output tokens {output}")
    return Workload.of(name, requests, source, labels)


def spread_models(
    workload: Workload, names: Sequence[str], shares: Sequence[float], seed: int = 0
) -> Workload:
    """The same requests over other models, drawn by `shares`; a session stays with one model.

    Makes a many-model workload of a single service's trace: synthetic, and labelled so.
    """
    weights = np.asarray(shares, dtype=np.float64)
    if len(names) != len(weights) or not len(names) or weights.min() < 0 or weights.sum() <= 0:
        raise WorkloadError("spread_models: one share of 0 or more per model, not all 0")
    rng = np.random.default_rng(seed)
    draws = rng.choice(len(names), len(workload.requests), p=weights / weights.sum()).tolist()
    of_session: dict[str, int] = {}
    requests = []
    for r, draw in zip(workload.requests, draws, strict=True):
        place = draw if r.session is None else of_session.setdefault(r.session, draw)
        requests.append(replace(r, model=names[place]))
    label = f"synthetic mix: spread over {len(names)} models, seed {seed}"
    return Workload.of(workload.name, requests, workload.source, (*workload.labels, label))


def _check_rate(rate: float, seconds: float) -> None:
    if not (0 < rate < float("inf") and 0 < seconds < float("inf")):
        raise WorkloadError(f"no arrivals at {rate!r} per second for {seconds!r} seconds")
