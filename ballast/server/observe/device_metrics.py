"""Export the device part of `/metrics`: pages and models, and the series by which inference
gateways choose a pod.

Reads the workers' last reports only; a scrape never waits for a worker, and never fails.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from itertools import accumulate
from typing import Protocol

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from ballast.core.clock import Clock
from ballast.core.model import ModelSpec
from ballast.core.report import STEP_BOUNDS, DeviceReport, ModelReport
from ballast.core.view import Residency

log = logging.getLogger(__name__)


class OneDevice(Protocol):
    """The facts about one device; `ballast.cluster.device.RemoteDevice` provides them."""

    @property
    def report(self) -> DeviceReport | None: ...

    @property
    def host(self) -> str: ...

    @property
    def down(self) -> str | None: ...

    @property
    def restarts(self) -> int: ...

    @property
    def moved_in(self) -> int: ...

    @property
    def requests(self) -> Sized: ...


class Facts(Protocol):
    """The devices by name, and facts about all of them together.

    `ballast.cluster.device_set.DeviceSet` provides it.
    """

    def items(self) -> Iterable[tuple[str, OneDevice]]: ...

    @property
    def report(self) -> DeviceReport | None: ...

    @property
    def specs(self) -> Mapping[str, ModelSpec]: ...

    @property
    def down(self) -> str | None: ...

    @property
    def restarts(self) -> int: ...


class DeviceCollector(Collector):
    """Collects metrics from the devices' last reports at each scrape. `wall` dates the series that
    carry a time as their value."""

    def __init__(self, facts: Facts, wall: Clock) -> None:
        self._facts = facts
        self._wall = wall

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics; a part that raises is left out and logged, so that a scrape never
        fails."""
        report, specs = self._facts.report, dict(self._facts.specs)
        yield GaugeMetricFamily(
            "ballast_worker_up", "1: a device's process answers", self._facts.down is None
        )
        yield CounterMetricFamily(
            "ballast_worker_restarts",
            "Workers started in place of one that died",
            value=self._facts.restarts,
        )
        if report is None:
            return
        now = self._wall.now()
        devices = dict(self._facts.items())
        parts: tuple[Callable[[], Iterable[Metric]], ...] = (
            lambda: _devices(devices),
            lambda: _hosts(devices),
            lambda: _pool(report),
            lambda: _models(report),
            lambda: _caches(report, specs),
            lambda: _pod(report, specs),
            lambda: _served(report, specs, now),
        )
        for part in parts:
            try:
                yield from list(part())
            except Exception:  # any error: the other metrics are still needed
                log.exception("metrics of the device cannot be told")


def _devices(devices: Mapping[str, OneDevice]) -> Iterator[Metric]:
    """Yield the metrics of each device; all others are sums over the devices."""
    label = ("device",)
    up = GaugeMetricFamily("ballast_device_up", "1: its process answers", labels=label)
    restarts = CounterMetricFamily(
        "ballast_device_restarts", "Its workers started in place of one that died", labels=label
    )
    moved = CounterMetricFamily(
        "ballast_device_requests_moved_in",
        "Requests that came from other devices with their KV",
        labels=label,
    )
    requests = GaugeMetricFamily(
        "ballast_device_open_requests", "Requests given to it that have not ended", labels=label
    )
    pages = GaugeMetricFamily(
        "ballast_device_bytes", "Its memory, by what has it", labels=("device", "owner")
    )
    lent = GaugeMetricFamily(
        "ballast_device_lent_bytes", "Of its memory, lent to others", labels=("device", "borrower")
    )
    borrowed = GaugeMetricFamily(
        "ballast_device_borrowed_bytes",
        "Others' memory that it may use",
        labels=("device", "lender"),
    )
    models = GaugeMetricFamily(
        "ballast_device_residency",
        "1: where a model's weights are, on each device that serves it",
        labels=("device", "model_name", "residency"),
    )
    for name, device in devices.items():
        up.add_metric((name,), device.down is None)
        restarts.add_metric((name,), device.restarts)
        moved.add_metric((name,), device.moved_in)
        requests.add_metric((name,), len(device.requests))
        report = device.report
        if report is None:
            continue
        held = Counter({"free": report.free, "reclaiming": report.reclaiming})
        for (kind, _), n in owned(report).items():
            held[kind] += n
        for owner, n in report.owners.items():
            if owner.startswith("lent:"):
                lent.add_metric((name, owner.removeprefix("lent:")), n * report.page_bytes)
        for lender, n in report.borrowed.items():
            borrowed.add_metric((name, lender), n * report.page_bytes)
        for kind, n in held.items():
            pages.add_metric((name, kind), n * report.page_bytes)
        for m in report.models:
            models.add_metric((name, m.name, m.residency), 1)
    yield from (up, restarts, moved, requests, pages, lent, borrowed, models)


def _hosts(devices: Mapping[str, OneDevice]) -> Iterator[Metric]:
    """Yield the metrics of each host, where devices are on many."""
    at = GaugeMetricFamily(
        "ballast_device_host", "1: the host that it is on", labels=("device", "host")
    )
    number = GaugeMetricFamily("ballast_host_devices", "Its devices that serve", labels=("host",))
    requests = GaugeMetricFamily(
        "ballast_host_open_requests", "Open requests of its devices", labels=("host",)
    )
    hosts: dict[str, list[OneDevice]] = {}
    for name, device in devices.items():
        if device.host:
            at.add_metric((name, device.host), 1)
            hosts.setdefault(device.host, []).append(device)
    for host, here in hosts.items():
        number.add_metric((host,), sum(device.down is None for device in here))
        requests.add_metric((host,), sum(len(device.requests) for device in here))
    yield from (at, number, requests)


def _pool(report: DeviceReport) -> Iterator[Metric]:
    pages = GaugeMetricFamily("ballast_pages", "Pages by owner", labels=("owner", "model"))
    for key, n in owned(report).items():
        pages.add_metric(key, n)
    yield pages
    for name, help, value in (
        ("ballast_page_bytes", "Bytes of a page", report.page_bytes),
        ("ballast_pool_pages", "Pages of the pool: owned, free and reclaiming", report.total),
        ("ballast_free_pages", "Pages that nobody owns", report.free),
        ("ballast_reclaiming_pages", "Pages given back, in use by a job", report.reclaiming),
    ):
        yield GaugeMetricFamily(name, help, value=value)
    yield CounterMetricFamily("ballast_jobs", "Jobs run", value=report.jobs)


_MODEL = ("model_name",)

_MODEL_GAUGES = (
    ("vllm_num_requests_running", "Requests in the batch", "running"),
    ("vllm_num_requests_waiting", "Requests that wait for memory or a place", "waiting"),
    (
        "ballast_requests_paused",
        "Requests whose client does not read, or whose grammar is being compiled",
        "paused",
    ),
    ("ballast_cached_pages", "Pages that hold cached prefixes only", "cached_pages"),
    ("ballast_staged_blocks", "KV blocks read on the host, layer by layer", "staged_blocks"),
    ("ballast_staged_bytes", "Bytes of these", "staged_bytes"),
    ("ballast_layers", "Decoder layers", "layers"),
    ("ballast_resident_layers", "Layers on the device in memory of their own", "resident_layers"),
    ("ballast_in_place_layers", "Layers that are read in host memory", "in_place_layers"),
    ("ballast_rotating_layers", "Layers that share slots", "rotating_layers"),
    ("ballast_absent_layers", "Layers that are not on the device now", "absent_layers"),
)
"""Gauges of each model: metric, help, and field of `ModelReport`."""

_MODEL_COUNTERS = (
    ("vllm_num_preemptions", "Requests preempted", "preemptions"),
    ("vllm_prefix_cache_queries", "Prompt tokens looked up in the prefix cache", "prompt_tokens"),
    ("vllm_prefix_cache_hits", "Prompt tokens found in the prefix cache", "cached_tokens"),
    ("ballast_activations", "Times its weights were brought in", "activations"),
    ("ballast_evictions", "Times its weights were evicted", "evictions"),
    ("ballast_lane_seconds", "Seconds of compute that its jobs have taken", "lane_seconds"),
    ("ballast_layer_loads", "Layers brought one by one, for they rotate", "loads"),
    ("ballast_layer_loaded_bytes", "Bytes of these loads", "loaded_bytes"),
    ("ballast_layer_copy_seconds", "Seconds of these loads on their link", "copy_seconds"),
    ("ballast_layer_stall_seconds", "Seconds its jobs waited for layers", "stall_seconds"),
)
"""Counters of each model: metric, help, and field of `ModelReport`."""


def _models(report: DeviceReport) -> Iterator[Metric]:
    for name, help, field in _MODEL_GAUGES:
        gauge = GaugeMetricFamily(name, help, labels=_MODEL)
        for m in report.models:
            gauge.add_metric((m.name,), getattr(m, field))
        yield gauge
    yield from _model_memory(report)
    shares = GaugeMetricFamily(
        "ballast_cached_pages_of_keys",
        "Pages that hold cached prefixes only, by API key",
        labels=(*_MODEL, "key"),
    )
    for m in report.models:
        for key, pages in m.cached_pages_of.items():
            shares.add_metric((m.name, key), pages)
    yield shares
    for name, help, field in _MODEL_COUNTERS:
        counter = CounterMetricFamily(name, help, labels=_MODEL)
        for m in report.models:
            counter.add_metric((m.name,), getattr(m, field))
        yield counter
    steps = HistogramMetricFamily(
        "vllm_iteration_tokens", "Tokens that a job computed", labels=_MODEL
    )
    bounds = [*map(floatToGoString, STEP_BOUNDS), "+Inf"]
    for m in report.models:
        within = zip(bounds, map(float, accumulate(m.steps.counts)), strict=True)
        steps.add_metric((m.name,), list(within), m.steps.total)
    yield steps
    residency = GaugeMetricFamily(
        "ballast_residency", "1: where its weights are", labels=("model_name", "residency")
    )
    for m in report.models:
        residency.add_metric((m.name, m.residency), 1)
    yield residency


def _model_memory(report: DeviceReport) -> Iterator[Metric]:
    given_up = GaugeMetricFamily(
        "ballast_layers_lent_bytes", "Memory that its rotating layers have given up", labels=_MODEL
    )
    usage = GaugeMetricFamily(
        "vllm_kv_cache_usage_perc",
        "Of the pages it could have for KV, those in use",
        labels=_MODEL,
    )
    for m in report.models:
        given_up.add_metric((m.name,), m.lent_pages * report.page_bytes)
        usage.add_metric((m.name,), _usage(report, (m,)))
    yield given_up
    yield usage


def _caches(report: DeviceReport, specs: Mapping[str, ModelSpec]) -> Iterator[Metric]:
    info = GaugeMetricFamily(
        "vllm_cache_config_info",
        "1. Blocks that would fit with the device to itself",
        labels=("model_name", "block_size", "num_gpu_blocks"),
    )
    for spec in specs.values():
        pages = _room(report) - spec.weight_pages(report.page_bytes)
        blocks = max(0, pages) * report.page_bytes // spec.block_bytes
        info.add_metric((spec.name, str(spec.block_tokens), str(blocks)), 1)
    yield info


def _pod(report: DeviceReport, specs: Mapping[str, ModelSpec]) -> Iterator[Metric]:
    """Yield the metrics of the whole pod, without a model label: an endpoint picker reads one
    series of a pod."""
    models = report.models
    waiting, running = sum(m.waiting for m in models), sum(m.running for m in models)
    for name, help, value in (
        ("ballast_queued_requests", "Requests that wait, of all models", waiting),
        ("ballast_running_requests", "Requests in batches, of all models", running),
        ("ballast_kv_cache_usage", "Of all pages for KV, those in use", _usage(report, models)),
    ):
        yield GaugeMetricFamily(name, help, value=value)
    if specs:
        tokens = min(s.block_tokens for s in specs.values())
        most = max(s.kv_bytes_per_token for s in specs.values())
        blocks = _room(report) * report.page_bytes // (tokens * most)
        info = GaugeMetricFamily(
            "ballast_cache_config_info",
            "1. Blocks of the model with the largest ones that would fit without any weights",
            labels=("block_size", "num_gpu_blocks"),
        )
        info.add_metric((str(tokens), str(blocks)), 1)
        yield info


def _served(report: DeviceReport, specs: Mapping[str, ModelSpec], now: float) -> Iterator[Metric]:
    """Yield the models and adapters that are resident or awaited, in the form in which gateways
    read LoRA adapters."""
    adapters = {
        m.name: [a.name for a in specs[m.name].adapters] for m in report.models if m.name in specs
    }
    names = {m: [m, *own] for m, own in adapters.items()}
    gauges = (
        ("vllm_lora_requests_info", "Adapters whose base is resident, or waited for", adapters),
        ("ballast_lora_requests_info", "The same, of models as well", names),
    )
    for name, help, by_model in gauges:
        most = sum(map(len, by_model.values()))
        if most == 0:
            continue
        here, coming = [], []
        for m in report.models:
            if m.residency == Residency.RESIDENT.value:
                here += by_model.get(m.name, [])
            elif m.waiting or m.residency == Residency.ACTIVATING.value:
                coming += by_model.get(m.name, [])
        gauge = GaugeMetricFamily(
            name, help, labels=("max_lora", "running_lora_adapters", "waiting_lora_adapters")
        )
        gauge.add_metric((str(most), ",".join(here), ",".join(coming)), now)
        yield gauge


def owned(report: DeviceReport) -> dict[tuple[str, str], int]:
    """Count pages by (kind of owner, model). Activations of all lanes are one entry without a
    model, and so are pages lent to other devices."""
    held: dict[tuple[str, str], int] = {}
    for owner, n in report.owners.items():
        kind, _, name = owner.partition(":")
        key = (kind, "" if kind in ("arena", "lent") else name)
        held[key] = held.get(key, 0) + n
    return held


def _room(report: DeviceReport) -> int:
    """Pages for weights and KV: all but those for activations."""
    return report.total - owned(report).get(("arena", ""), 0)


def _usage(report: DeviceReport, models: Iterable[ModelReport]) -> float:
    """Fraction of the pages that these models hold or could take for KV which requests use, 0 to
    1."""
    backed = used = 0
    for m in models:
        backed += m.kv_pages
        used += m.kv_pages - m.cached_pages
    could = backed + report.free + report.reclaiming
    return used / could if could else 0.0
