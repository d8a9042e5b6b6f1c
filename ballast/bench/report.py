"""Summarise a run as a `Report`: latencies, service levels, throughput and memory, also as JSON.

Built from request records and memory samples; the same for live and simulated runs.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ballast.bench.record import RequestRecord
from ballast.bench.sample import DecisionRecord, MemorySample, bytes_by_use
from ballast.core.errors import ConfigError
from ballast.core.settings import Slo


@dataclass(frozen=True, slots=True)
class LatencyStats:
    """A latency over the requests that have one, in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> LatencyStats | None:
        """None where there are no values. Percentiles interpolate linearly."""
        there = np.array([v for v in values if v is not None], dtype=np.float64)
        if not there.size:
            return None
        p50, p90, p99 = np.percentile(there, (50, 90, 99))
        return cls(float(there.mean()), float(p50), float(p90), float(p99))


@dataclass(frozen=True, slots=True)
class RequestStats:
    """How some requests (one model's, or all) were served."""

    requests: int
    answered: int
    failed: int
    attained: int
    """Answered within both service levels. A failed request attains nothing."""
    attained_ttft: int
    attained_tpot: int
    prompt_tokens: int
    """Prompt tokens of answered requests; likewise below."""
    cached_tokens: int
    recomputed_tokens: int
    """Prompt tokens that were computed though an earlier request had computed them."""
    output_tokens: int
    preemptions: int
    ttft: LatencyStats | None
    """Over answered requests; likewise below."""
    tpot: LatencyStats | None
    e2e: LatencyStats | None

    @property
    def attainment(self) -> float:
        """Share of all requests that attained; 1 where there are none."""
        return self.attained / self.requests if self.requests else 1.0

    @classmethod
    def of(cls, records: Iterable[RequestRecord], slos: Mapping[str, Slo]) -> RequestStats:
        """Counts and spreads of `records`."""
        every = list(records)
        done = [r for r in every if r.answered]
        ttft = [r for r in done if _ttft_holds(r, slos[r.model])]
        tpot = [r for r in done if _tpot_holds(r, slos[r.model])]
        return cls(
            requests=len(every),
            answered=len(done),
            failed=len(every) - len(done),
            attained=sum(_tpot_holds(r, slos[r.model]) for r in ttft),
            attained_ttft=len(ttft),
            attained_tpot=len(tpot),
            prompt_tokens=sum(r.prompt_tokens for r in done),
            cached_tokens=sum(r.cached_tokens for r in done),
            recomputed_tokens=sum(max(0, r.repeated_tokens - r.cached_tokens) for r in done),
            output_tokens=sum(r.output_tokens for r in done),
            preemptions=sum(r.preemptions for r in done),
            ttft=LatencyStats.of(r.ttft for r in done),
            tpot=LatencyStats.of(r.tpot for r in done),
            e2e=LatencyStats.of(r.e2e for r in done),
        )


@dataclass(frozen=True, slots=True)
class Report:
    """One run of one workload, under one preset."""

    name: str
    """Label of this run, for example its preset."""
    workload: str
    """Description of the workload, with every change to the trace."""
    wall_seconds: float
    total: RequestStats
    models: dict[str, RequestStats]
    """By model, in order of name; models with a service level but no request included."""
    slos: dict[str, Slo]
    errors: dict[str, int]
    """Requests by reason of failure, most frequent first."""
    latest_send: float
    """Seconds by which the sender was late at worst: large values make a run invalid."""
    records: tuple[RequestRecord, ...]
    memory: tuple[MemorySample, ...]
    decisions: tuple[DecisionRecord, ...] = ()
    """In order of time; empty where the target does not show them."""

    @classmethod
    def of(
        cls,
        records: Sequence[RequestRecord],
        slos: Mapping[str, Slo],
        wall_seconds: float,
        memory: Sequence[MemorySample] = (),
        decisions: Sequence[DecisionRecord] = (),
        *,
        name: str = "run",
        workload: str = "",
    ) -> Report:
        """Build the report of a run. Raises ConfigError where a model has no service level or no
        time has passed.

        `wall_seconds`: divisor of throughput, from the start of the workload to the last answer.
        """
        if not wall_seconds > 0:
            raise ConfigError("wall_seconds", wall_seconds, "positive")
        unknown = sorted({r.model for r in records} - set(slos))
        if unknown:
            raise ConfigError("slos", unknown, "every model of the run needs a service level")
        by_model: dict[str, list[RequestRecord]] = {name: [] for name in sorted(slos)}
        for record in records:
            by_model[record.model].append(record)
        return cls(
            name=name,
            workload=workload,
            wall_seconds=wall_seconds,
            total=RequestStats.of(records, slos),
            models={m: RequestStats.of(rs, slos) for m, rs in by_model.items()},
            slos=dict(slos),
            errors=dict(Counter(r.error for r in records if r.error).most_common()),
            latest_send=max((r.sent - r.at for r in records), default=0.0),
            records=tuple(records),
            memory=tuple(memory),
            decisions=tuple(sorted(decisions, key=lambda d: (d.at, d.device))),
        )

    @property
    def requests_per_second(self) -> float:
        """Answered requests over wall time."""
        return self.total.answered / self.wall_seconds

    @property
    def output_tokens_per_second(self) -> float:
        """Output tokens of answered requests over wall time."""
        return self.total.output_tokens / self.wall_seconds

    @property
    def rate_weighted_requests_per_second(self) -> float:
        """Answered requests over wall time of each model, averaged with the models' shares of all
        requests as weights (MuxServe, section 4.1). Models with few requests hardly count in it;
        `worst_attainment` covers these."""
        answered = sum(m.answered * m.requests for m in self.models.values())
        return answered / max(1, self.total.requests) / self.wall_seconds

    @property
    def worst_attainment(self) -> float:
        """Attainment of the model served worst: the mean over all requests hides starved models."""
        return min((m.attainment for m in self.models.values()), default=1.0)

    def to_json(self) -> dict[str, Any]:
        """Plain data with stable keys; times in seconds, memory in bytes, no single records."""
        owners = [s.owners for s in self.memory]
        uses = [bytes_by_use(o) for o in owners]
        done = Counter(d.action for d in self.decisions if d.refused is None)
        return {
            "name": self.name,
            "workload": self.workload,
            "wall_seconds": self.wall_seconds,
            "requests_per_second": self.requests_per_second,
            "output_tokens_per_second": self.output_tokens_per_second,
            "rate_weighted_requests_per_second": self.rate_weighted_requests_per_second,
            "worst_attainment": self.worst_attainment,
            "latest_send": self.latest_send,
            "total": _served_json(self.total),
            "models": {
                name: {**_served_json(served), "slo": asdict(self.slos[name])}
                for name, served in self.models.items()
            },
            "errors": self.errors,
            "memory": {
                "at": [s.at for s in self.memory],
                "bytes": _series(owners),
                "uses": _series(uses),
                "waiting": _series([s.waiting for s in self.memory]),
                "peak": {owner: max(series) for owner, series in _series(owners).items()},
            },
            "decisions": dict(sorted(done.items())),
        }

    def write_json(self, path: str | Path) -> None:
        """`to_json` as a file."""
        Path(path).write_text(json.dumps(self.to_json(), indent=2) + "\n", encoding="utf-8")


def _series(samples: Sequence[Mapping[str, int]]) -> dict[str, list[int]]:
    """By key, its number in each sample, 0 where it is absent."""
    keys = sorted({key for sample in samples for key in sample})
    return {key: [sample.get(key, 0) for sample in samples] for key in keys}


def _served_json(served: RequestStats) -> dict[str, Any]:
    return {"attainment": served.attainment, **asdict(served)}


def _ttft_holds(record: RequestRecord, slo: Slo) -> bool:
    return record.ttft is not None and record.ttft <= slo.ttft


def _tpot_holds(record: RequestRecord, slo: Slo) -> bool:
    """Holds for answers of a single token, which have no time per further token."""
    return record.tpot is None or record.tpot <= slo.tpot
