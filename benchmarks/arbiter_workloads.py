"""The ten workloads of `arbiter_sim` and `headroom`: models of the catalogue and their arrivals;
and three of them on other devices.

Each is a function of rate, seconds and seed. Traces are used where they are at hand
(`../shared/traces`), generators of like arrivals in their place elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ballast.bench.run_options import workload_of
from ballast.core.link import LinkRates
from ballast.core.model import ModelSpec
from ballast.core.settings import Slo
from ballast.sim.cluster import parse_kinds
from ballast.sim.model_catalogue import catalogue
from ballast.sim.topology import APART, ClusterLinks, PeerLinks
from ballast.workload.generators import assemble, independent, poisson, power_law
from ballast.workload.lengths import LogNormal
from ballast.workload.traces import load_trace
from ballast.workload.workload import Workload, WorkloadRequest

TRACES = Path(__file__).resolve().parents[2] / "shared/traces"
ARENA = "arena27_vtc_prism_0-300s.csv.gz"
AZURE = ("azure2023_conv_until1845.csv.gz", "azure2023_code_until1845.csv.gz")
CONTEXT = 8192
SLO = Slo(ttft=2.0, tpot=0.1)
BLOCK = 64
"""Tokens of a block of a prefix that requests share."""
PROMPT = LogNormal.of_cv(400.0, 1.0, most=3072)
OUTPUT = LogNormal.of_cv(200.0, 1.0, most=1024)

Arrivals = Callable[[Sequence[str], float, float, int], Workload]
"""Takes model names, requests per second, seconds and a seed."""


@dataclass(frozen=True)
class ArbiterWorkload:
    """Models, devices and arrivals of one workload."""

    models: tuple[str, ...]
    """Names in the catalogue; one that recurs is another model of the same size."""
    arrivals: Arrivals
    devices: str = "1xH100-80G"
    links: ClusterLinks = APART
    scale: float = 1.0
    """Factor of the rates at which it is run, for more devices."""

    @property
    def names(self) -> list[str]:
        """Names under which the models are served."""
        return [f"{name}#{i}" for i, name in enumerate(self.models)]

    def specs(self) -> list[ModelSpec]:
        """The models, each with weights of its own."""
        known = catalogue()
        served = {"max_model_len": CONTEXT, "slo": SLO}
        return [
            replace(known[of].spec(**served), name=name, fingerprint=name)
            for of, name in zip(self.models, self.names, strict=True)
        ]

    def make(self, rate: float, seconds: float, seed: int) -> Workload:
        """Return about `seconds` of arrivals at `rate` requests a second."""
        return self.arrivals(self.names, rate, seconds, seed).within(CONTEXT // 2)


def arena(names: Sequence[str], rate: float, seconds: float, seed: int) -> Workload:
    """A part of LMSYS Chatbot Arena, that begins elsewhere by seed; bursts without the trace."""
    return _trace([ARENA], names, rate, seconds, seed, spread=None)


def azure(names: Sequence[str], rate: float, seconds: float, seed: int) -> Workload:
    """Azure's conversations and its code completions, over models by a power law."""
    return _trace(AZURE, names, rate, seconds, seed, spread=0.9)


def _trace(
    files: Sequence[str],
    names: Sequence[str],
    rate: float,
    seconds: float,
    seed: int,
    spread: float | None,
) -> Workload:
    """Parts of trace files, each an equal share of `rate`."""
    if not all((TRACES / file).is_file() for file in files):
        return workload_of(
            ("bursty", "gamma")[: len(files)],
            names,
            rate=rate,
            seconds=seconds,
            most_tokens=2048,
            seed=seed,
        )
    share = rate / len(files)
    parts = []
    for file in files:
        trace = load_trace(TRACES / file)
        n = max(1, round(share * seconds))
        first = int(np.random.default_rng([seed, n]).integers(max(1, len(trace.requests) - n)))
        part = trace.requests[first : first + n]
        start, end = part[0].at, part[-1].at
        moved = (replace(r, at=(r.at - start) * seconds / (end - start)) for r in part)
        parts.append(Workload.of(trace.name, moved, f"{trace.source}, from request {first}"))
    whole = Workload.apart(parts) if len(parts) > 1 else parts[0]
    return whole.map_models(names) if spread is None else whole.spread_models(names, spread, seed)


def bursty(names: Sequence[str], rate: float, seconds: float, seed: int) -> Workload:
    """Groups of models in use at once (Prism, appendix A.1)."""
    return workload_of("bursty", names, rate=rate, seconds=seconds, most_tokens=2048, seed=seed)


def long_tail(names: Sequence[str], rate: float, seconds: float, seed: int) -> Workload:
    """A power law of exponent 1.5 over many models."""
    return independent(
        names, rate, seconds, alpha=1.5, cv=2.0, prompt=PROMPT, output=OUTPUT, seed=seed
    )


def steady(names: Sequence[str], rate: float, seconds: float, seed: int) -> Workload:
    """All models alike, Poisson arrivals."""
    return independent(names, rate, seconds, alpha=0.0, prompt=PROMPT, output=OUTPUT, seed=seed)


def flash_crowd(names: Sequence[str], rate: float, seconds: float, seed: int) -> Workload:
    """As `steady`; in the middle third the least popular model has half of all requests."""
    base = independent(
        names, 0.75 * rate, seconds, alpha=0.9, prompt=PROMPT, output=OUTPUT, seed=seed
    )
    rng = np.random.default_rng([seed, 7])
    times = seconds / 3 + poisson(0.75 * rate, seconds / 3, rng)
    crowd = assemble("crowd", names[-1:], [times], PROMPT, OUTPUT, seed, "generated: a crowd")
    return Workload.merge("flash crowd", [base, crowd])


def alternation(names: Sequence[str], rate: float, seconds: float, seed: int) -> Workload:
    """Models asked one after the other, each for `2 to 4` seconds, so that the model used longest
    ago is the next: the worst case of recency."""
    rng = np.random.default_rng([seed, 9])
    arrivals: list[list[float]] = [[] for _ in names]
    at, turn = 0.0, 0
    while at < seconds:
        spell = min(float(rng.uniform(2.0, 4.0)), seconds - at)
        arrivals[turn % len(names)] += (at + poisson(rate, spell, rng)).tolist()
        at, turn = at + spell, turn + 1
    found = [np.array(times, dtype=np.float64) for times in arrivals]
    return assemble("alternation", names, found, PROMPT, OUTPUT, seed, "generated: in turn")


def _sessions(
    names: Sequence[str],
    rate: float,
    seconds: float,
    seed: int,
    *,
    turns: float,
    think: float,
    first: tuple[int, int],
    grows: tuple[int, int],
    output: tuple[int, int],
) -> Workload:
    """Sessions whose prompts each begin with all of the one before: `turns` in the mean, `think`
    seconds between them; tokens of first prompts, of what each turn adds, and of answers."""
    rng = np.random.default_rng([seed, 11])
    requests: list[WorkloadRequest] = []
    shares = power_law(len(names), 0.9)
    drawn: list[tuple[float, int, int, int, int]] = []
    for session, start in enumerate(poisson(rate / turns, seconds, rng).tolist()):
        model = int(rng.choice(len(names), p=shares))
        at, tokens = start, int(rng.integers(*first))
        for _ in range(int(rng.geometric(1 / turns))):
            answer = int(rng.integers(*output))
            if at >= seconds or tokens + answer > CONTEXT // 2:
                break
            drawn.append((at, session, model, tokens, answer))
            tokens += answer + int(rng.integers(*grows))
            at += float(rng.exponential(think)) + 0.03 * answer
    for n, (at, session, model, tokens, answer) in enumerate(sorted(drawn)):
        base = session * CONTEXT
        blocks = tuple(range(base, base + math.ceil(tokens / BLOCK)))
        requests.append(
            WorkloadRequest(
                id=n,
                at=at,
                model=names[model],
                prompt_tokens=tokens,
                output_tokens=answer,
                session=str(session),
                prefix_blocks=blocks,
                block_tokens=BLOCK,
            )
        )
    return Workload.of("sessions", requests, f"generated: sessions, {rate:g}/s, seed {seed}")


def multi_turn(names: Sequence[str], rate: float, seconds: float, seed: int) -> Workload:
    """Conversations: few turns, long pauses."""
    return _sessions(
        names,
        rate,
        seconds,
        seed,
        turns=5.0,
        think=6.0,
        first=(64, 512),
        grows=(32, 256),
        output=(64, 384),
    )


def agents(names: Sequence[str], rate: float, seconds: float, seed: int) -> Workload:
    """Agents: many turns on long prompts, short pauses, short answers."""
    return _sessions(
        names,
        rate,
        seconds,
        seed,
        turns=12.0,
        think=1.0,
        first=(1024, 3072),
        grows=(64, 256),
        output=(16, 128),
    )


def documents(names: Sequence[str], rate: float, seconds: float, seed: int) -> Workload:
    """Questions on documents that requests share, popular ones more often."""
    rng = np.random.default_rng([seed, 13])
    n_documents, longest = 16, CONTEXT // 2 - 1024
    lengths = rng.integers(1024, longest, size=(len(names), n_documents)) // BLOCK
    popularity = power_law(n_documents, 0.8)
    requests = []
    for n, at in enumerate(poisson(rate, seconds, rng).tolist()):
        model = int(rng.integers(len(names)))
        document = int(rng.choice(n_documents, p=popularity))
        blocks = int(lengths[model, document])
        base = (model * n_documents + document) * CONTEXT
        requests.append(
            WorkloadRequest(
                id=n,
                at=at,
                model=names[model],
                prompt_tokens=blocks * BLOCK + int(rng.integers(64, 513)),
                output_tokens=int(rng.integers(32, 257)),
                prefix_blocks=tuple(range(base, base + blocks)),
                block_tokens=BLOCK,
            )
        )
    return Workload.of("documents", requests, f"generated: documents, {rate:g}/s, seed {seed}")


_MIXED = ("Llama-3-8b", "Qwen2.5-7b", "Qwen3-8b", "Llama-2-7b", "Qwen3-4b")
"""68 GB of weights."""
_EIGHT = (*_MIXED, "Llama-3.2-3b", "Qwen3-14b", "Qwen3-1.7b")
"""106 GB of weights, more than a device has."""
_TAIL = (*_EIGHT, "Qwen3-8b", "Llama-3-8b", "Qwen2.5-3b", "Llama-3.2-1b")
_LARGE_KV = ("Llama-2-13b", "Llama-2-7b", "Llama-3-8b")

WORKLOADS = {
    "arena": ArbiterWorkload(_EIGHT, arena),
    "azure": ArbiterWorkload(_MIXED, azure),
    "bursty": ArbiterWorkload(_TAIL, bursty),
    "long_tail": ArbiterWorkload((*_TAIL, *_TAIL), long_tail, "2xH100-80G"),
    "multi_turn": ArbiterWorkload(_MIXED, multi_turn),
    "agents": ArbiterWorkload(_MIXED, agents),
    "documents": ArbiterWorkload(_LARGE_KV, documents),
    "steady": ArbiterWorkload(_LARGE_KV, steady),
    "flash_crowd": ArbiterWorkload(_EIGHT, flash_crowd),
    "alternation": ArbiterWorkload(_EIGHT, alternation),
}
"""By name, in the order of the issue."""

_NVLINK = ClusterLinks(per_host=4, peers=PeerLinks.NVLINK, port=LinkRates.even(200e9, 400e9))
"""As SwiftCache's H20s (`swift_sim`)."""
OTHER_DEVICES = {
    "GH200": (1, "GH200-96G", APART),
    "4xH20": (4, "H20-96G", _NVLINK),
    "8xA100": (8, "A100-80G", ClusterLinks(per_host=8)),
}
"""By name: how many devices, of which kind, and how they are joined."""


def _elsewhere(name: str, place: str) -> ArbiterWorkload:
    """Return a workload on other devices, at as many requests for each."""
    of = WORKLOADS[name]
    n, device, links = OTHER_DEVICES[place]
    before = sum(kind.number for kind in parse_kinds(of.devices))
    return replace(of, devices=f"{n}x{device}", links=links, scale=n / before)


ELSEWHERE = {
    f"{name}@{place}": _elsewhere(name, place)
    for name in ("arena", "bursty", "long_tail")
    for place in OTHER_DEVICES
}
"""Three of the workloads on other devices."""
ALL = WORKLOADS | ELSEWHERE
