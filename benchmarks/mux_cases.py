"""MuxServe's evaluation (Duan et al., 2024) as experiments: LLaMA models on A100s in virtual time.

What the text leaves open is chosen: a length of 1 is a request of ShareGPT within LLaMA's context,
the engine is of the paper's time, and levels are eight times what a request alone sees. Rows of an
experiment have the same requests and, as far as their presets have them, the same options; prompts
have jobs of their own, and requests are admitted as they come. Ways to use the devices:

- `spatial`: each model has devices of its own (`static`), as few as hold it and one request each of
  16; what is left doubles the devices of the model that Equation 3 expects to fall short most.
- `spatial, by size`: what is left goes to the model with the most weights on each device.
- `temporal`: models share meshes as MuxServe places them; one job at a time, first come first
  served, one pool of KV, as the paper has AlpaServe's way.
- `muxserve`: the same placement, prefills beside decodes on three lanes, quotas of KV.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache, cached_property

import numpy as np

from ballast.bench.cluster_run import run_cluster
from ballast.core.cost import StepCosts, Traffic
from ballast.core.job import JobLoad
from ballast.core.model import ModelSpec
from ballast.core.settings import Slo
from ballast.policy.fleet.mux_estimate import Tenant, estimate
from ballast.policy.fleet.mux_placement import place
from ballast.policy.fleet.placement_problem import PlacementDevice
from ballast.policy.presets import resolve
from ballast.sim.cluster import USABLE, Kind, parse_kinds
from ballast.sim.cluster_files import ClusterFiles, GivenHomes
from ballast.sim.model_catalogue import facts
from ballast.workload.generators import assemble, poisson, power_law
from ballast.workload.lengths import SHAREGPT_OUTPUT, SHAREGPT_PROMPT, LogNormal
from ballast.workload.workload import Workload, WorkloadRequest
from benchmarks.contenders import Comparison, Contender
from benchmarks.experiment import Experiment, Outcome, outcome_of

DEVICE = "A100-80G"
ENGINE = "eager"
PER_HOST = 8
CONTEXT = 2048
SLO_SCALE = 8.0
LANES = 3
LEAST_RUNNING = 16
"""Requests of mean length that a model's devices hold at least where they are its own."""
ROOM = 1.1
"""Memory of a model's devices over its weights, at least."""
ROOM_FOR_LANES = 1.2
"""The same where activations of jobs on several lanes lie beside them."""
LENGTHS = SHAREGPT_PROMPT.mean, SHAREGPT_OUTPUT.mean
TERMS = {"late_last": 0.0, "fair_shares": 0.0, "separate": 1.0}
Meshes = Sequence[tuple[int, Sequence[str]]]
"""How many devices, and which models these serve."""


@cache
def kind_of(ranks: int, lanes: int = 1) -> Kind:
    """So many devices as one."""
    (kind,) = parse_kinds(f"{DEVICE}:tp{ranks}", lanes, ENGINE)
    return kind


@cache
def memory() -> float:
    """Bytes of a device that are for weights and KV."""
    hardware = kind_of(1).profile.hardware
    assert hardware is not None
    return USABLE * hardware.memory_bytes


def fewest(least: float, devices: int = 1) -> int:
    """Devices, no fewer than `devices`, that have more than so many bytes: 1, 2, 4 or 8."""
    return next(n for n in (1, 2, 4, 8) if n >= devices and n * memory() > least)


def level(costs: StepCosts, prompt: int) -> Slo:
    """`SLO_SCALE` times what a request with such a prompt sees that is alone."""
    step = costs.of(JobLoad(0, 0, 0, 1, prompt))
    return Slo(ttft=SLO_SCALE * costs.prefill_seconds(prompt), tpot=SLO_SCALE * step)


def costs_of(kind: Kind, spec: ModelSpec) -> Callable[[int, float], StepCosts]:
    """What jobs of a model cost on a share of so many devices' compute: as measured, between two
    shares each coefficient linear in 1 / share, below the least in proportion to that. Where
    nothing was measured for a group, a share takes all as many times longer."""

    @cache
    def measured(devices: int) -> list[tuple[float, StepCosts]]:
        whole = replace(kind, ranks=devices).costs(spec)
        return [*kind.profile.on_parts(spec, devices), (1.0, whole)]

    def costs(devices: int, share: float) -> StepCosts:
        rows = measured(devices)
        less = [row for row in rows if row[0] <= share]
        if not less:
            at, found = rows[0]
            return found.scaled(at / share)
        below, above = less[-1], next(row for row in rows if row[0] >= share)
        if below[0] == above[0]:
            return below[1]
        part = (1 / share - 1 / above[0]) / (1 / below[0] - 1 / above[0])
        pairs = zip(astuple(above[1]), astuple(below[1]), strict=True)
        return StepCosts(*(a + part * (b - a) for a, b in pairs))

    return costs


def apart(tenants: Sequence[Tenant], devices: int) -> Meshes:
    """Devices for each model alone, by what it is asked."""

    def short(t: Tenant, n: int) -> tuple[float, float]:
        """Requests per second that it will not serve; that it is asked."""
        alone = estimate([t], {t.name: 1.0}, n, n * memory())
        assert alone is not None
        return t.traffic.rate - alone[t.name].rate, t.traffic.rate

    return _alone(tenants, devices, short)


def by_size(tenants: Sequence[Tenant], devices: int) -> Meshes:
    """Devices for each model alone, by its size."""
    return _alone(tenants, devices, lambda t, n: (t.weights / n, t.weights))


def _alone(
    tenants: Sequence[Tenant], devices: int, need: Callable[[Tenant, int], tuple[float, float]]
) -> Meshes:
    """What is left once all have room goes, doubling, to who needs it most."""
    ranks = {}
    for t in tenants:
        needed = t.weights + LEAST_RUNNING * t.request_bytes
        ranks[t.name] = fewest(needed, t.least_devices)
    while True:
        left = devices - sum(ranks.values())
        wanting = [t for t in tenants if ranks[t.name] <= min(left, PER_HOST // 2)]
        if not wanting:
            return [(n, [name]) for name, n in ranks.items()]
        ranks[max(wanting, key=lambda t: need(t, ranks[t.name])).name] *= 2


def together(tenants: Sequence[Tenant], devices: int) -> Meshes:
    """MuxServe's placement."""
    each = [PlacementDevice(f"d{i}", memory()) for i in range(devices)]
    found = place(tenants, each, PER_HOST)
    return [(len(mesh.devices), list(mesh.models)) for mesh in found.meshes]


def serve(
    compared: Comparison,
    row: str,
    specs: Sequence[ModelSpec],
    meshes: Meshes,
    lanes: int,
    work: Workload,
    seconds: float,
) -> Outcome:
    """Serve a workload with models that are placed so; the second half counts for throughput."""
    homes: dict[str, list[int | str]] = {n: [i] for i, (_, ns) in enumerate(meshes) for n in ns}
    slos = {s.name: s.slo for s in specs}
    ran = run_cluster(
        resolve(compared.rows[row].preset, compared.options(row)),
        [kind_of(ranks, lanes) for ranks, _ in meshes],
        specs,
        work,
        slos,
        files=ClusterFiles(homes=GivenHomes(row, homes)),
    )
    return outcome_of(ran, slos, seconds / 2, seconds)


Way = tuple[Callable[[Sequence[Tenant], int], Meshes], int]
"""How models are placed, and the lanes of their devices."""
CLUSTERED: Mapping[str, Way] = {
    "spatial": (apart, 1),
    "spatial, by size": (by_size, 1),
    "temporal": (together, 1),
    "muxserve": (together, LANES),
}


@dataclass(frozen=True)
class Cluster:
    """Models of LLaMA's sizes on A100s, asked by a power law; the axis is requests per second of a
    model, on average."""

    sizes: Mapping[str, int]
    """How many models of each LLaMA."""
    devices: int
    alpha: float
    """The power law's exponent; which model has which rank is drawn."""
    compared: Comparison
    ways: Mapping[str, Way]

    @property
    def models(self) -> dict[str, str]:
        """Which LLaMA each model is, by name."""
        return {f"{like[6:]}-{i}": like for like, n in self.sizes.items() for i in range(n)}

    @cached_property
    def specs(self) -> list[ModelSpec]:
        """With service levels as on as few devices as hold the model."""
        found = []
        for name, like in self.models.items():
            spec = facts(like).spec(max_model_len=CONTEXT, fingerprint=like, max_running=256)
            ranks = fewest(ROOM * sum(spec.segment_bytes))
            slo = level(kind_of(ranks).costs(spec), round(SHAREGPT_PROMPT.mean))
            found.append(replace(spec, name=name, slo=slo))
        return found

    def workload(self, rate: float, seconds: float, seed: int) -> Workload:
        """Poisson arrivals, `rate` a second for each model on average."""
        names = list(self.models)
        shares = power_law(len(names), self.alpha)
        order = np.random.default_rng([seed, 7]).permutation(len(names))
        arrivals = [
            poisson(rate * len(names) * shares[k], seconds, np.random.default_rng([seed, i]))
            for i, k in enumerate(order.tolist())
        ]
        source = f"generated: {rate:g}/s a model for {seconds:g} s, seed {seed}"
        lengths = SHAREGPT_PROMPT, SHAREGPT_OUTPUT
        return assemble("cluster", names, arrivals, *lengths, seed, source)

    def tenants(self, work: Workload, seconds: float) -> list[Tenant]:
        """The models as the placement sees them."""
        asked = Counter(r.model for r in work.requests)
        found = []
        for spec in self.specs:
            traffic = Traffic(asked[spec.name] / seconds, *LENGTHS)
            weights, kv = sum(spec.segment_bytes), spec.kv_bytes_per_token
            costs, least = costs_of(kind_of(1), spec), fewest(ROOM_FOR_LANES * weights)
            bound = spec.slo.tpot, costs, least, spec.max_running
            found.append(Tenant(spec.name, weights, kv, traffic, *bound))
        return found

    def __call__(self, row: str, rate: float, seed: int, seconds: float, cut: bool) -> Outcome:
        work = self.workload(rate, seconds, seed)
        way, lanes = self.ways[row]
        meshes = way(self.tenants(work, seconds), self.devices)
        return serve(self.compared, row, self.specs, meshes, lanes, work, seconds)


@dataclass(frozen=True)
class FigureTen:
    """Models on one group of four A100s; the axis is a factor on the rates of the figure."""

    rates: Mapping[str, float]
    """Requests per second."""
    lengths: Mapping[str, float]
    """Of a model's requests, over `length`."""

    @property
    def specs(self) -> list[ModelSpec]:
        """The models, with levels for a request of mean length."""
        found = []
        for name in self.rates:
            spec = facts(name).spec(max_model_len=CONTEXT, fingerprint=name, max_running=256)
            prompt = round(self.lengths[name] * SHAREGPT_PROMPT.mean)
            found.append(replace(spec, slo=level(kind_of(4).costs(spec), prompt)))
        return found

    def workload(self, factor: float, seconds: float, seed: int) -> Workload:
        """Poisson arrivals; lengths of ShareGPT, each model's scaled, within the context."""
        drawn: list[tuple[float, str, int, int]] = []
        for index, (model, rate) in enumerate(self.rates.items()):
            rng = np.random.default_rng([seed, index])
            times = poisson(rate * factor, seconds, rng)
            scale = self.lengths[model]
            prompts = _scaled(SHAREGPT_PROMPT, scale).sample(rng, len(times))
            outputs = _scaled(SHAREGPT_OUTPUT, scale).sample(rng, len(times))
            for at, p, o in zip(times.tolist(), prompts.tolist(), outputs.tolist(), strict=True):
                prompt = min(p, CONTEXT // 2)
                drawn.append((at, model, prompt, min(o, CONTEXT - prompt)))
        requests = (
            WorkloadRequest(id=n, at=at, model=model, prompt_tokens=p, output_tokens=o)
            for n, (at, model, p, o) in enumerate(sorted(drawn))
        )
        return Workload.of("figure 10", requests, f"generated: {seconds:g} s, seed {seed}", ())

    def __call__(self, row: str, factor: float, seed: int, seconds: float, cut: bool) -> Outcome:
        lanes = 1 if row == "fcfs" or row.endswith("one lane") else LANES
        meshes = [(4, list(self.rates))]
        work = self.workload(factor, seconds, seed)
        return serve(TEN, row, self.specs, meshes, lanes, work, seconds)


def _scaled(lengths: LogNormal, by: float) -> LogNormal:
    return LogNormal(lengths.mu + float(np.log(by)), lengths.sigma, CONTEXT)


TEN = Comparison(
    TERMS,
    {
        "fcfs": Contender("recompute+fcfs"),
        "round-robin": Contender("recompute+round-robin"),
        "muxserve": Contender("muxserve"),
        "adbs": Contender("recompute+adbs"),
        "muxserve, one lane": Contender("muxserve"),
    },
)
"""One pool of KV but under `muxserve`; `adbs`: its order of compute alone."""
WAYS = Comparison(
    TERMS,
    {
        "spatial": Contender("static"),
        "spatial, by size": Contender("static"),
        "temporal": Contender("recompute+fcfs"),
        "muxserve": Contender("muxserve"),
    },
)
TEN_A = FigureTen(
    {"LLaMA-30b": 2.0, "LLaMA-13b": 8.0, "LLaMA-7b": 8.0},
    {"LLaMA-30b": 2.0, "LLaMA-13b": 1.0, "LLaMA-7b": 1.0},
)
TEN_B = FigureTen({"LLaMA-65b": 1.0, "LLaMA-30b": 8.0}, {"LLaMA-65b": 4.0, "LLaMA-30b": 1.0})
NINETEEN = {"LLaMA-7b": 12, "LLaMA-13b": 4, "LLaMA-30b": 2, "LLaMA-65b": 1}
"""Table 1."""
FACTORS = (0.25, 0.5, 1.0, 2.0)
RATES = (1.0, 2.0, 4.0, 8.0)


def _ten(title: str, unit: FigureTen, fcfs: float | None, turns: float | None) -> Experiment:
    over = {"fcfs": fcfs, "round-robin": turns}
    return Experiment(title, TEN, FACTORS, unit, over=over, at=1.0)


MUXSERVE = {
    "mux_10a": _ten("Figure 10a: 30B, 13B, 7B on four A100s", TEN_A, 1.63, 1.51),
    "mux_10b": _ten("Figure 10b: 65B, 30B on four A100s", TEN_B, 2.06, 1.35),
    "mux_19": Experiment(
        "19 models on 32 A100s",
        WAYS,
        RATES,
        Cluster(NINETEEN, 32, 0.9, WAYS, CLUSTERED),
        seconds=60.0,
        over={"spatial": 1.8, "spatial, by size": 1.8, "temporal": None},
    ),
}
"""Axes: for Figure 10 a factor on its rates, else requests per second of a model on average."""
