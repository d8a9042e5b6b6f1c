"""Simulate passes that read weights in host memory, over the link that others use too (C2CServe).

A pass computes and reads at the same time: it ends when it has done its work on the device and when
the link has carried what it reads. The link's part is a flow beside all others of the host, so that
passes of other slices, and copies, slow it. What it reads, and what it moves in device memory
instead, follows from the model's matrices and from the knob (`core.pass_traffic`). Used by
`sim.runner`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ballast.core.cost import StepCosts
from ballast.core.gemm_traffic import GemmTraffic
from ballast.core.job import JobLoad
from ballast.core.link import Direction
from ballast.core.link_budget import link_demand
from ballast.core.model import ModelSpec
from ballast.core.pass_traffic import OS_TILE, PassSizes, pass_traffic
from ballast.core.residency_plan import ResidencyPlan
from ballast.policy.c2cserve_knob import Knob, KnobRule, KnobSetting, PassMeasurement
from ballast.sim.layer_passes import Pass
from ballast.sim.link import SimLink

_MANY = 512
"""Rows of a pass that reads about all experts of each layer."""


@dataclass(frozen=True, slots=True)
class InPlaceMachine:
    """A machine on which passes can read weights over a link."""

    memory_bandwidth: float
    """Bytes per second of device memory that kernels reach."""
    multiprocessors: int
    without_reading: Callable[[ModelSpec], StepCosts] = field(compare=False)
    """Returns a model's job costs as if its weights were read in no time."""

    def costs(self, spec: ModelSpec, link: float) -> StepCosts:
        """Return the costs that policies expect of a model whose weights are all in host memory,
        with the link (bytes per second) to itself and the knob where rows take least."""
        sizes, work = PassSizes.of(spec), self.without_reading(spec)

        def traffic(rows: int, os_share: float = 0.0) -> GemmTraffic:
            return pass_traffic(sizes, rows, 1, os_share, self.multiprocessors)

        def row(os_share: float) -> float:
            more = traffic(2 * _MANY, os_share) + traffic(_MANY, os_share).times(-1)
            return more.times(1 / _MANY).seconds(link, self.memory_bandwidth)

        base = max(work.base, traffic(1).link / link)
        return replace(
            work,
            base=base,
            floor=max(work.floor, traffic(_MANY).link / link),
            hidden=base - work.base + work.hidden,
            per_token=max(work.per_token, min(row(k / 10) for k in range(11))),
        )


class InPlaceReads:
    """What passes of one model read over the link. Implements `sim.layer_passes.LayerSource`."""

    stops: Sequence[int] = ()

    def __init__(
        self,
        spec: ModelSpec,
        resident: StepCosts,
        machine: InPlaceMachine | None,
        link: SimLink,
        plan: Callable[[], ResidencyPlan],
        knob: KnobSetting,
    ) -> None:
        """`resident`: job costs with weights in device memory; `machine`: None where host memory is
        the device's memory, so that a pass costs no more there; `plan`: as it is now."""
        self._spec, self._sizes, self._machine = spec, PassSizes.of(spec), machine
        self._resident, self._plan, self._rule = resident, plan, knob.rule
        self._work = resident if machine is None else machine.without_reading(spec)
        self._reserved = knob.reserves
        self._stream = link.stream(f"in place:{spec.name}", Direction.TO_DEVICE)
        self.knob = Knob(os_share=knob.start)
        self._job: Pass | None = None
        self._moving = 0
        self._bytes = 1
        """Bytes that the pass which began last reads over the link."""
        self._load = JobLoad(0, 0, 0, 0, 0)
        self.link_bytes = 0
        """Bytes that passes have read over the link so far."""

    @property
    def waits(self) -> bool:
        return bool(self._plan().in_place)

    @property
    def open(self) -> bool:
        return self._moving > 0

    def seconds(self, load: JobLoad) -> float:
        """Return the seconds of a job on the device, and remember it as the one that begins."""
        self._load = load
        if self._machine is None:
            return self._resident.of(load)
        return max(self._work.of(load), self._memory_seconds(self._machine, load))

    def _memory_seconds(self, machine: InPlaceMachine, load: JobLoad) -> float:
        """Return the seconds of device memory in a pass, with the knob as it is."""
        away, rows, rate = self._plan().share_away, _rows(load), machine.memory_bandwidth
        here = (1.0 - away) * pass_traffic(self._sizes, rows, 1, 0.0, machine.multiprocessors).link
        moved = away * self._traffic(rows).memory_seconds(rate) + here / rate
        return moved + load.decode_context * self._work.per_context

    def begin(self, now: float, job: Pass, read: int, written: int) -> None:
        self._job = job
        if self._machine is None:
            plan = self._plan()
            n_bytes = sum(plan.units[i].n_bytes for i in plan.in_place)
        else:
            n_bytes = max(1, round(self._plan().share_away * self._traffic(max(1, written)).link))
        self._bytes = n_bytes
        self.link_bytes += n_bytes
        self._moving += 1
        reserved = self.demand if self._reserved else 0.0
        self._stream.carry(now, n_bytes, self._ended, reserved=reserved)

    @property
    def demand(self) -> float:
        """Bytes per second of the link by which a lone stream keeps its TPOT level."""
        read = self._plan().share_away * self._traffic(1).link
        return link_demand(read, self._spec.slo.tpot)

    def lacks(self, layer: int) -> bool:
        return False

    def used(self, now: float, layer: int) -> None:
        """Do nothing: no room is made at a layer."""

    def stalls(self, layer: int) -> None:
        """Do nothing: it never lacks a layer."""

    def waited(self, seconds: float) -> None:
        """Do nothing: the wait is in the job's `stall`."""

    def _ended(self, now: float, seconds: float) -> None:
        self._moving -= 1
        if self._rule is not None:
            self._measure(seconds, self._rule)
        assert self._job is not None
        if not self._moving:
            self._job.closed(now)

    def _measure(self, on_link: float, rule: KnobRule) -> None:
        """Update the knob at each layer's boundary (7.3), by what a layer takes at the rate at
        which the link carried this pass; it acts from the next pass on. Passes of one tile of rows
        read weights once whatever it is."""
        load, machine, slo = self._load, self._machine, self._spec.slo
        away, rate = self._plan().share_away, self._bytes / max(on_link, 1e-9)
        if machine is None or not away or _rows(load) <= OS_TILE.rows:
            return
        for _ in range(self._sizes.layers):
            memory = self._memory_seconds(machine, load)
            link = away * self._traffic(_rows(load)).link / rate
            seconds = max(link, memory, self._work.of(load), 1e-9)
            budget = slo.tpot if load.decode_sequences else slo.ttft
            seen = PassMeasurement(seconds, budget, link / seconds, memory / seconds)
            self.knob = self.knob.after(seen, rule)

    def _traffic(self, rows: int) -> GemmTraffic:
        programs = 1 if self._machine is None else self._machine.multiprocessors
        return pass_traffic(self._sizes, rows, 1, self.knob.os_share, programs)


def _rows(load: JobLoad) -> int:
    """Rows of the matrix products of a pass."""
    return load.prefill_tokens + load.decode_sequences
