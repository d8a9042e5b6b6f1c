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
"""Most rounds of adapting batches, which depend on each other: each model's prefills delay the
others'."""


@dataclass(frozen=True, slots=True, eq=False)
class Tenant:
    """A model of a mesh, with its traffic and costs."""

    name: str
    weights: float
    """Bytes of its weights."""
    kv_bytes_per_token: float
    traffic: Traffic
    """Requests per second, and mean tokens of each."""
    tpot: float
    """Seconds per output token that a decode step may take."""
    costs: Callable[[int, float], StepCosts]
    """Returns the costs of jobs, by the number of devices over which the model is spread and by its
    share of their compute (0 to 1)."""
    least_devices: int = 1
    """Least devices over which it can be spread."""
    most_running: int = 256
    """Most requests of a batch."""

    @property
    def request_bytes(self) -> float:
        """Bytes of KV of one request of mean length at its end."""
        return self.kv_bytes_per_token * self.tokens

    @property
    def tokens(self) -> float:
        return self.traffic.prompt_tokens + self.traffic.output_tokens


@dataclass(frozen=True, slots=True)
class Estimate:
    """Expected throughput of one model of a mesh."""

    rate: float
    """Requests per second that are served, at most those that arrive."""
    batch: int
    """Requests that decode together."""
    share: float
    """Share of the mesh's compute that its decode steps have."""


def estimate(
    tenants: Sequence[Tenant], shares: Mapping[str, float], devices: int, memory: float
) -> dict[str, Estimate] | None:
    """Return the throughput of each model on a mesh of `devices` devices with `memory` bytes in
    all; None if weights and one request of each do not fit.

    For model m with a batch of b requests: min(b / (sum of all models' prefills + a decode step x
    output tokens), its rate). Each model's batch is the smallest that serves its rate, by binary
    search, and no larger than its part of KV memory (by rate x size), its service level or
    `most_running` allow. `shares`: by model, the share of compute of its decode steps; scaled down
    if they add up to more than 1. Prefills have the whole mesh, one after the other.
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
        """Return the seconds of prefilling a batch."""
        pairs = batch * chunk_pairs(self._prompt, 0)
        return self._whole.of(JobLoad(batch * self._prompt, batch, pairs, 0, 0))

    def step(self, batch: int) -> float:
        """Return the seconds of a decode step of a batch."""
        return self._part.of(JobLoad(0, 0, 0, batch, batch * self._context))

    def rate(self, batch: int, prefills: float) -> float:
        """Return the requests per second of a batch, if all models' prefills take `prefills`
        seconds."""
        return batch / (prefills + self.step(batch) * self.tenant.traffic.output_tokens)

    def within(self, tpot: float) -> int:
        """Return the largest batch whose decode step takes at most `tpot` seconds; 0: none does."""
        most = self.tenant.most_running
        return bisect_left(range(1, most + 1), True, key=lambda b: self.step(b) > tpot)

    def least_batch(self, others: float, most: int) -> int:
        """Return the smallest batch that serves the model's rate beside the prefills of others, at
        most `most`."""
        rate = self.tenant.traffic.rate
        met = bisect_left(
            range(1, most), True, key=lambda b: self.rate(b, others + self.prefill(b)) >= rate
        )
        return met + 1
