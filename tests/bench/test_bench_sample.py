"""Memory and queues of devices at a moment, and decisions as a story tells them."""

from __future__ import annotations

from ballast.bench.sample import DecisionRecord, DeviceSample, MemorySample, decisions_of
from ballast.core.report import DeviceReport, ModelReport


def model(name: str, cached_pages: int = 0, waiting: int = 0, running: int = 0) -> ModelReport:
    return ModelReport(
        name=name, residency="resident", weight_pages=4, kv_pages=2, cached_pages=cached_pages,
        waiting=waiting, running=running, late=0, lane_seconds=0.0, activations=0, evictions=0,
        preemptions=0, prompt_tokens=0, cached_tokens=0, output_tokens=0,
    )  # fmt: skip


def device(name: str = "d", cached_pages: int = 0) -> DeviceReport:
    owners = {"weights:a": 3, "slots:a": 1, "kv:a": 2, "arena:lanes": 1, "shared:x": 1, "lent:e": 1}
    return DeviceReport(
        device=name, now=0.0, page_bytes=10, total=14, free=4, reclaiming=1, owners=owners,
        models=(model("a", cached_pages, waiting=3, running=1), model("b")), jobs=0, draining=False,
    )  # fmt: skip


def test_owners_add_up_to_the_budget_with_cached_prefixes_apart() -> None:
    sample = DeviceSample.of(device(cached_pages=1))
    assert sum(sample.owners.values()) == 14 * 10
    assert (sample.owners["kv:a"], sample.owners["cached:a"]) == (10, 10)
    assert (sample.waiting, sample.running) == ({"a": 3}, {"a": 1})


def test_no_more_is_cached_than_the_device_itself_holds() -> None:
    """Pages of other devices back a cache, too, and a report's numbers are of several moments."""
    sample = DeviceSample.of(device(cached_pages=9))
    assert (sample.owners["kv:a"], sample.owners["cached:a"]) == (0, 20)
    assert sum(sample.owners.values()) == 14 * 10


def test_uses_are_sums_over_models_and_devices() -> None:
    devices = {name: DeviceSample.of(device(name, 1)) for name in ("d", "e")}
    sample = MemorySample(1.5, devices)
    assert sample.uses == {
        "weights": 100, "kv": 20, "cached": 20, "activations": 20, "lent": 20, "reclaiming": 20,
        "free": 80,
    }  # fmt: skip
    assert sample.waiting == {"a": 6}


def test_decisions_are_a_storys_actions() -> None:
    entries = [
        {"at": 5.0, "event": "Timer"},
        {"at": 5.5, "action": "Evict", "model": "a", "why": "idle", "refused": "it runs"},
        {"at": 6.0, "action": "Recall", "to": "e", "pages": None, "device": "f"},
    ]
    assert decisions_of(entries, "d", 5.0) == (
        DecisionRecord(0.5, "d", "Evict", "a", "idle", "it runs"),
        DecisionRecord(1.0, "f", "Recall", "", ""),
    )
