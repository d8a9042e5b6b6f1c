"""Made-up runs to draw: ten models on two devices, whose pages move from weights to KV and back."""

from __future__ import annotations

from ballast.bench.record import RequestRecord
from ballast.bench.report import Report
from ballast.bench.sample import DecisionRecord, DeviceSample, MemorySample
from ballast.core.settings import Slo
from ballast.core.units import MiB

MODELS = tuple(f"model-{i}" for i in range(10))
SLOS = dict.fromkeys(MODELS, Slo(ttft=1.0, tpot=0.1))
DEVICES = ("cpu:0", "cpu:1")
BUDGET = 64
"""MiB of each device."""
SECONDS = 30


def record(n: int, late: bool = False, error: str | None = None) -> RequestRecord:
    at = SECONDS * n / 60
    first = at + (2.5 if late else 0.25)
    return RequestRecord(
        id=n, model=MODELS[n % 10], at=at, sent=at, first_token=None if error else first,
        end=first + 0.5, prompt_tokens=10, output_tokens=11, token_times=(first, first + 0.5),
        error=error,
    )  # fmt: skip


def device(first: int, at: int) -> DeviceSample:
    """Five models from `first`; each is away for a part of the time, which others use for KV."""
    owners = {"arena:lanes": 4 * MiB}
    for i in range(first, first + 5):
        present = (at + 3 * i) % SECONDS < 22
        owners[f"weights:{MODELS[i]}"] = 6 * MiB if present else 0
        owners[f"kv:{MODELS[i]}"] = ((at + i) % 6) * MiB if present else 0
        owners[f"cached:{MODELS[i]}"] = (i % 3) * MiB // 2 if present else 0
    owners["free"] = BUDGET * MiB - sum(owners.values())
    return DeviceSample(owners, {MODELS[first]: 100 * (at % 7)})


def report(name: str, late: int = 0, failed: int = 0) -> Report:
    """60 requests, of which the last `late` and, before them, `failed` miss their service level."""
    records = [
        record(
            n, n >= 60 - late, "refused: no pages" if 60 - late - failed <= n < 60 - late else None
        )
        for n in range(60)
    ]
    samples = [
        MemorySample(float(at), {d: device(5 * i, at) for i, d in enumerate(DEVICES)})
        for at in range(SECONDS)
    ]
    decisions = [
        DecisionRecord(10.0, "cpu:0", "Activate", "model-1", "a request </script> waits"),
        DecisionRecord(12.0, "cpu:0", "Evict", "model-2", "idle for 8 s"),
        DecisionRecord(14.0, "cpu:1", "Preempt", "model-7", "model-6 is late"),
        DecisionRecord(14.5, "cpu:1", "Evict", "model-8", "idle", "it is running"),
        DecisionRecord(15.0, "cpu:1", "DropCache", "model-8", "room for model-6"),
    ]
    return Report.of(
        records, SLOS, SECONDS + 2.0, samples, decisions, name=name, workload="bursty, made up"
    )
