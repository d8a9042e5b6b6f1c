"""Name metrics on export: vLLM's label `engine`, and the names of releases before this one.

Those had colons, which Prometheus keeps for recording rules, and a histogram that ended as counters
do. Used by `metrics`. To be removed with `server.deprecated_metrics` in the release after this one.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Metric

_ENGINE = {"engine": "0"}
"""vLLM's label for the number of a data-parallel engine. Always 0: metrics are sums over all
devices."""
_VLLM = "vllm_"
_WITHOUT_ENGINE = ("vllm_lora_requests_info",)
"""Metrics without that label, as in vLLM: gateways read them without it."""
_OWN = (_VLLM, "ballast_")
"""Prefixes whose underscore was a colon."""
_RENAMED = {"vllm_iteration_tokens": "vllm:iteration_tokens_total"}


class ExportedMetrics:
    """A registry's metrics as they are exported; `deprecated`: also under their older names, each
    with a help text that says so."""

    def __init__(self, registry: CollectorRegistry, deprecated: bool) -> None:
        self._registry = registry
        self._deprecated = deprecated

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            if metric.name.startswith(_VLLM) and metric.name not in _WITHOUT_ENGINE:
                metric.samples = [s._replace(labels=s.labels | _ENGINE) for s in metric.samples]
            yield metric
            if self._deprecated and metric.name.startswith(_OWN):
                yield _as_before(metric)


def older_name(name: str) -> str:
    """Return the name that a metric of ours had before."""
    return _RENAMED.get(name) or name.replace("_", ":", 1)


def _as_before(metric: Metric) -> Metric:
    older = copy.copy(metric)
    older.name = older_name(metric.name)
    older.documentation = f"Deprecated: use {metric.name}. {metric.documentation}"
    older.samples = [
        s._replace(name=older.name + s.name.removeprefix(metric.name)) for s in metric.samples
    ]
    return older
