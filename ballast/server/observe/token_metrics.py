"""Count tokens and inter-token gaps by model, for a fraction of a microsecond each.

Every token is counted: prometheus-client's own types, which lock, would cost too much.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

_LABELS = ("model_name",)


class Tokens:
    """Token count and inter-token gaps of one model. One thread counts; any may read."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.count = 0
        self._bounds = tuple(bounds)
        self._gaps = [0] * (len(bounds) + 1)
        """Number of gaps in each bucket; the last is for gaps above all bounds."""
        self._seconds = 0.0

    def gap(self, seconds: float) -> None:
        """Count the gap between two tokens of one output."""
        self._gaps[bisect_left(self._bounds, seconds)] += 1
        self._seconds += seconds

    def buckets(self) -> tuple[list[tuple[str, float]], float]:
        """Cumulative counts of gaps by upper bound, as Prometheus has them, and the sum of all gaps
        in seconds."""
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        return list(zip(bounds, map(float, accumulate(self._gaps)), strict=True)), self._seconds


class TokenCollector(Collector):
    """Exports the counts of all models as `counter`, and their gaps as each of `histograms`. Both
    give metrics as (name, help)."""

    def __init__(
        self,
        counter: tuple[str, str],
        histograms: Sequence[tuple[str, str]],
        bounds: Sequence[float],
    ) -> None:
        self._counter, self._histograms = counter, tuple(histograms)
        self._bounds = tuple(bounds)
        self._models: dict[str, Tokens] = {}

    def of(self, model: str) -> Tokens:
        """Return the counts of a model, to be counted in."""
        return self._models.setdefault(model, Tokens(self._bounds))

    def collect(self) -> Iterable[Metric]:
        models = list(self._models.items())
        counted = CounterMetricFamily(*self._counter, labels=_LABELS)
        for model, tokens in models:
            counted.add_metric([model], tokens.count)
        yield counted
        for name, help in self._histograms:
            family = HistogramMetricFamily(name, help, labels=_LABELS)
            for model, tokens in models:
                family.add_metric([model], *tokens.buckets())
            yield family
