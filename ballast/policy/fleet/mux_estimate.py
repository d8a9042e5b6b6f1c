"""Estimate the throughput of models that share a mesh of devices: MuxServe, Equation 3.

Used by `mux_placement` and the simulator's placement command, never by a running fleet.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ballast.core.cost import StepCosts, Traffic
from ballast.core.job import JobLoad, chunk_pairs

ROUNDS = 16
"""Of batches that depend on each other: each model's prefills delay the others'."""


@dataclass(frozen=True, slots=True, eq=False)
class Tenant:
    """A model, and what it is asked."""

    name: str
    weights: float
    """Bytes."""
    kv_bytes_per_token: float
    traffic: Traffic
    """Requests per second, and tokens of each."""
    tpot: float
    """Seconds per output token that a decode step may take."""
    costs: Callable[[int, float], StepCosts]
    """Of jobs, by devices over which the model is spread, and their share of these devices' compute
    (0 to 1)."""
    least_devices: int = 1
    """It is spread over no fewer."""
    most_running: int = 256
    """Requests of a batch."""

    @property
    def request_bytes(self) -> float:
        """KV of one request of mean length at its end."""
        return self.kv_bytes_per_token * self.tokens

    @property
    def tokens(self) -> float:
        return self.traffic.prompt_tokens + self.traffic.output_tokens


@dataclass(frozen=True, slots=True)
class Estimate:
    """What one model of a mesh is expected to serve."""

    rate: float
    """Requests per second, at most those that are asked."""
    batch: int
    """Requests that decode together."""
    share: float
    """Of the mesh's compute, that its decode steps have."""


def estimate(
    tenants: Sequence[Tenant], shares: Mapping[str, float], devices: int, memory: float
) -> dict[str, Estimate] | None:
    """Return what each of the models serves, on a mesh of so many devices with `memory` bytes in
    all; None where weights and one request of each do not fit.

    Of model m with a batch of b requests: min(b / (sum of all models' prefills + a decode step x
    output tokens), its rate), where each model's batch is the smallest that satisfies its rate, by
    binary search, and no larger than its part of KV memory (by rate x size), its service level or
    `most_running` allow. `shares`: of the compute, by model, of decode steps; scaled down where
    they add up to more than all of it. Prefills have the whole mesh, one after the other.
    """
    room = memory - sum(t.weights for t in tenants)
    size = {t.name: t.traffic.rate * t.request_bytes for t in tenants}
    total = sum(size.values())
    if room < sum(t.request_bytes for t in tenants):
        return None
    crowd = max(1.0, sum(shares[t.name] for t in tenants))
    jobs = {t.name: _Jobs(t, devices, shares[t.name] / crowd) for t in tenants}
    most = {}
    for t in tenants:
        part = room * size[t.name] / total if total else room / len(tenants)
        fits = int(part / t.request_bytes) if t.request_bytes else t.most_running
        most[t.name] = max(1, min(fits, t.most_running, jobs[t.name].within(t.tpot)))
    batches = dict.fromkeys((t.name for t in tenants), 1)
    for _ in range(ROUNDS):
        before = dict(batches)
        for t in tenants:
            others = sum(jobs[n].prefill(b) for n, b in batches.items() if n != t.name)
            batches[t.name] = jobs[t.name].least_batch(others, most[t.name])
        if batches == before:
            break
    prefills = sum(jobs[n].prefill(b) for n, b in batches.items())
    return {
        t.name: Estimate(
            min(jobs[t.name].rate(batches[t.name], prefills), t.traffic.rate),
            batches[t.name],
            jobs[t.name].share,
        )
        for t in tenants
    }


class _Jobs:
    """Latencies of one model's jobs on a mesh."""

    def __init__(self, tenant: Tenant, devices: int, share: float) -> None:
        self.tenant, self.share = tenant, share
        self._whole = tenant.costs(devices, 1.0)
        self._part = tenant.costs(devices, share)
        self._prompt = max(1, round(tenant.traffic.prompt_tokens))
        self._context = round(tenant.traffic.prompt_tokens + tenant.traffic.output_tokens / 2)

    def prefill(self, batch: int) -> float:
        """Seconds, of the prompts of a batch."""
        pairs = batch * chunk_pairs(self._prompt, 0)
        return self._whole.of(JobLoad(batch * self._prompt, batch, pairs, 0, 0))

    def step(self, batch: int) -> float:
        """Seconds, of a decode step."""
        return self._part.of(JobLoad(0, 0, 0, batch, batch * self._context))

    def rate(self, batch: int, prefills: float) -> float:
        """Requests per second, where all prefills take so long."""
        return batch / (prefills + self.step(batch) * self.tenant.traffic.output_tokens)

    def within(self, tpot: float) -> int:
        """The largest batch whose step is within a service level; 0: none is."""
        most = self.tenant.most_running
        return bisect_left(range(1, most + 1), True, key=lambda b: self.step(b) > tpot)

    def least_batch(self, others: float, most: int) -> int:
        """The smallest batch that satisfies the model's rate beside the prefills of others, or the
        largest there may be."""
        rate = self.tenant.traffic.rate
        met = bisect_left(
            range(1, most), True, key=lambda b: self.rate(b, others + self.prefill(b)) >= rate
        )
        return met + 1
