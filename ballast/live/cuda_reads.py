"""Choose how the passes of a GPU read weights in host memory: HybridGEMM's knob (C2CServe, 7.3).

::

    begin_pass   places and share of this pass      | event
                 kernels read pages, and host memory |
    finish                                           | event
    stalled      seconds between the two: the share of the next pass

`KernelReads` joins this to the barriers of a model's executor. What a pass moved over the link and
in device memory is modelled (`core.pass_traffic`), with rates that were measured as the device was
opened; how long it took is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from ballast.core.gemm_traffic import GemmTraffic
from ballast.core.job import SequenceWork
from ballast.core.pass_traffic import OS_TILE, PassSizes, pass_traffic
from ballast.kernels.paged_attention import LayerPlaces
from ballast.memory.cuda.bandwidth import MeasuredBandwidth
from ballast.memory.cuda.calls import Driver
from ballast.models.barriers import ALL_ON_DEVICE, Barriers, HostReads
from ballast.policy.c2cserve_knob import Knob, KnobSetting, PassMeasurement
from ballast.weights.residency import WeightsOnDevice


@dataclass(frozen=True, slots=True)
class HostKernels:
    """A GPU whose kernels read host memory."""

    driver: Driver
    stream: Callable[[], int]
    """Returns the stream of the calling lane's work."""
    multiprocessors: int
    knob: KnobSetting
    bandwidth: MeasuredBandwidth | None
    """None: it is not known, and the knob stays."""

    @property
    def tunes(self) -> bool:
        """Whether the knob moves."""
        return self.knob.rule is not None and self.bandwidth is not None


@dataclass(frozen=True, slots=True)
class _Pass:
    """A pass that reads host memory."""

    rows: int
    decodes: int
    context: int
    """Positions that its decodes attend to."""
    away: float
    """Part of the weights that lies in host memory."""
    began: int
    """Event at its begin."""


class KernelReads:
    """Implements `Barriers` over a stream's own, and `ReadsHost`, for the executor of one model."""

    def __init__(self, inner: Barriers, weights: WeightsOnDevice, gpu: HostKernels) -> None:
        self._inner, self._weights, self._gpu = inner, weights, gpu
        self._sizes = PassSizes.of(weights.spec)
        self.knob = Knob(os_share=gpu.knob.start)
        self._reads = ALL_ON_DEVICE
        self._pass: _Pass | None = None
        self._ended: int | None = None
        """Event after the pass; None: it has not been launched whole."""

    def host_reads(self) -> HostReads:
        return self._reads

    def places(self, work: Sequence[SequenceWork]) -> LayerPlaces | None:
        return self._inner.places(work)

    def begin_pass(self, work: Sequence[SequenceWork] = ()) -> Collection[int]:
        self._forget()
        plan = self._weights.plan
        self._reads = HostReads(plan.in_place, self.knob.os_share)
        rows = sum(len(w.tokens) for w in work)
        # One tile of rows reads weights once whatever the share.
        if plan.share_away and self._gpu.tunes and rows > OS_TILE.rows:
            decodes = [w for w in work if len(w.tokens) == 1]
            context = sum(w.end for w in decodes)
            began = self._event()
            self._pass = _Pass(rows, len(decodes), context, plan.share_away, began)
        return self._inner.begin_pass(work)

    def wait(self, layer: int) -> None:
        self._inner.wait(layer)

    def used(self, layer: int) -> None:
        self._inner.used(layer)

    def finish(self) -> None:
        try:
            self._inner.finish()
        finally:
            if self._pass is not None:
                self._ended = self._event()

    def move(self) -> None:
        self._inner.move()

    def stalled(self) -> float:
        """As `Barriers.stalled`. The work launched by then has ended: the knob moves."""
        if self._pass is not None and self._ended is not None:
            driver = self._gpu.driver
            self._measure(self._pass, driver.elapsed(self._pass.began, self._ended))
        self._forget()
        return self._inner.stalled()

    def _measure(self, seen: _Pass, seconds: float) -> None:
        """Update the knob by a pass that took so many seconds (7.3)."""
        gpu, spec = self._gpu, self._weights.spec
        rule, rates = gpu.knob.rule, gpu.bandwidth
        assert rule is not None, "a knob that stays measures nothing"
        assert rates is not None, "nor does one without rates"

        def traffic(share: float) -> GemmTraffic:
            return pass_traffic(self._sizes, seen.rows, 1, share, gpu.multiprocessors)

        moved, memory = traffic(self._reads.os_share), rates.memory
        here = (1.0 - seen.away) * traffic(0.0).link + seen.context * spec.kv_bytes_per_token
        device = seen.away * moved.memory_seconds(memory) + here / memory
        link = seen.away * moved.link / rates.to_device
        seconds = max(seconds, link, device)
        budget = spec.slo.tpot if seen.decodes else spec.slo.ttft
        self.knob = self.knob.after(
            PassMeasurement(seconds, budget, link / seconds, device / seconds), rule
        )

    def _event(self) -> int:
        """Record and return a timed event on the lane's stream."""
        driver = self._gpu.driver
        event = driver.new_event(timed=True)
        driver.record(event, self._gpu.stream())
        return event

    def _forget(self) -> None:
        """Destroy the events of the last pass."""
        last, ended = self._pass, self._ended
        self._pass, self._ended = None, None
        for event in (None if last is None else last.began, ended):
            if event is not None:
                self._gpu.driver.destroy_event(event)
