"""The share of HybridGEMM on a GPU follows what passes took, over the stand-in of its driver."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ballast.core.job import SequenceWork
from ballast.core.residency_plan import ResidencyPlan, Unit
from ballast.core.settings import Slo
from ballast.live.cuda_reads import HostKernels, KernelReads
from ballast.memory.cuda.bandwidth import MeasuredBandwidth
from ballast.models.barriers import host_reads
from ballast.policy.c2cserve_knob import KnobRule, KnobSetting
from ballast.sim.model_catalogue import facts
from tests.memory.fake_cuda import FakeDriver
from tests.models.host_served import Places

SPEC = facts("Llama-3-8b").spec(max_model_len=16384, name="a", slo=Slo(ttft=1.0, tpot=0.1))
EVERYTHING = frozenset(range(len(SPEC.segment_bytes)))
SLOW_MEMORY = MeasuredBandwidth(to_device=400e9, to_host=400e9, memory=0.2e12)
SLOW_LINK = MeasuredBandwidth(to_device=50e9, to_host=50e9, memory=4e12)


class Passes:
    """Passes of a model whose weights are in these places, on a lane's stream of a driver."""

    def __init__(self, driver: FakeDriver) -> None:
        self.driver, self.stream = driver, driver.new_stream()
        units = tuple(Unit(1, n) for n in SPEC.segment_bytes)
        self.weights = SimpleNamespace(spec=SPEC, plan=ResidencyPlan(units, SPEC.n_layers))

    def reads(self, rates: MeasuredBandwidth | None, **knob: Any) -> KernelReads:
        setting = KnobSetting(**knob)
        gpu = HostKernels(self.driver, lambda: self.stream, 132, setting, rates)
        return KernelReads(cast(Any, Places()), cast(Any, self.weights), gpu)

    def read(self, units: frozenset[int]) -> None:
        self.weights.plan = self.weights.plan.reading(units)

    def run(self, reads: KernelReads, rows: int, seconds: float) -> float:
        """One pass that takes so long on the device; returns its share."""
        work = SequenceWork("r", [1] * rows, 0, list(range(rows // 16 + 1)), None)
        reads.begin_pass([work])
        share = host_reads(reads).os_share
        self.driver.put(self.stream, lambda: None, [], seconds=seconds)
        reads.finish()
        self.driver.finish(self.stream)
        reads.stalled()
        return share


@pytest.fixture
def passes() -> Iterator[Passes]:
    driver = FakeDriver()
    driver.set_current(driver.retain_context(0))
    made = Passes(driver)
    yield made
    assert not driver.events, "each pass's events go with it"


@pytest.mark.parametrize("seconds", [0.5, 4.0])
def test_the_share_rises_while_device_memory_is_short(passes: Passes, seconds: float) -> None:
    """By no more than a step at a time, of another size for passes that are late."""
    passes.read(EVERYTHING)
    reads, rule = passes.reads(SLOW_MEMORY), KnobRule()
    shares = [passes.run(reads, 512, seconds) for _ in range(6)]
    step = rule.step if seconds < SPEC.slo.ttft else rule.late_step
    assert shares == pytest.approx([i * step for i in range(6)])


def test_the_share_falls_to_nothing_while_the_link_is_short(passes: Passes) -> None:
    passes.read(EVERYTHING)
    reads = passes.reads(SLOW_LINK, start=0.1)
    shares = [passes.run(reads, 512, 0.5) for _ in range(8)]
    assert shares == pytest.approx([0.1, 0.08, 0.06, 0.04, 0.02, 0.0, 0.0, 0.0])


def test_places_are_those_of_the_pass(passes: Passes) -> None:
    reads = passes.reads(None)
    for units in (frozenset({1, 2}), EVERYTHING, frozenset[int]()):
        passes.read(units)
        passes.run(reads, 4, 0.1)
        assert host_reads(reads).units == units


def test_the_share_stays_where_nothing_is_to_be_learned(passes: Passes) -> None:
    """Of one tile of rows; of weights on the device; of rates that are unknown; if it is fixed."""
    passes.read(EVERYTHING)
    moving = passes.reads(SLOW_MEMORY)
    for _ in range(3):
        assert passes.run(moving, 128, 4.0) == 0.0
    passes.read(frozenset())
    for _ in range(3):
        assert passes.run(moving, 512, 4.0) == 0.0
    assert moving.knob.passes == 0
    passes.read(EVERYTHING)
    for fixed in (passes.reads(None, start=0.4), passes.reads(SLOW_MEMORY, rule=None, start=0.4)):
        for _ in range(3):
            assert passes.run(fixed, 512, 4.0) == 0.4


def test_a_pass_that_broke_off_is_forgotten(passes: Passes) -> None:
    passes.read(EVERYTHING)
    reads = passes.reads(SLOW_MEMORY)
    reads.begin_pass([SequenceWork("r", [1] * 512, 0, list(range(33)), None)])
    assert passes.run(reads, 512, 4.0) == 0.0
    assert reads.knob.passes == 1
