"""Export the host's KV tiers in `/metrics`: what they hold, and what has happened in them.

Used by `Service`. Reads the tiers' report at each scrape; without tiers there are no series.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ballast.cluster.kept_kv import KvReport
from ballast.core.report import DeviceReport


class KvCollector(Collector):
    """Collects metrics of KV tiers. `tiers` and `device`: the last reports, of all devices
    together; None: there is none."""

    def __init__(
        self, tiers: Callable[[], KvReport | None], device: Callable[[], DeviceReport | None]
    ) -> None:
        self._tiers, self._device = tiers, device

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        found = self._tiers()
        if found is None:
            return
        label = ("tier",)
        used = GaugeMetricFamily("ballast_kv_tier_used_bytes", "KV in a tier", labels=label)
        capacity = GaugeMetricFamily("ballast_kv_tier_capacity_bytes", "Its bound", labels=label)
        blocks = GaugeMetricFamily("ballast_kv_tier_blocks", "Blocks in a tier", labels=label)
        for tier in found.tiers:
            used.add_metric([tier.tier], tier.used_bytes)
            capacity.add_metric([tier.tier], tier.capacity_bytes)
            blocks.add_metric([tier.tier], tier.blocks)
        events = CounterMetricFamily(
            "ballast_kv_tier_events",
            "Blocks stored, fetched, refused..",
            labels=["event"],
        )
        for event, n in found.counts.items():
            events.add_metric([event], n)
        up = GaugeMetricFamily(
            "ballast_kv_disk_up", "0: the disk was given up", not found.disk_fault
        )
        yield from (used, capacity, blocks, events, up)
        report = self._device()
        tokens = CounterMetricFamily(
            "ballast_kv_fetched_tokens", "Prompt tokens whose KV came from a tier", labels=label
        )
        for name, n in ({} if report is None else report.fetched_tokens).items():
            tokens.add_metric([name], n)
        yield tokens
