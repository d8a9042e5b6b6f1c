"""Passes over weights in host memory, in virtual time (C2CServe)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise

import pytest

from ballast.core.clock import VirtualClock
from ballast.core.cost import StepCosts
from ballast.core.event import Output, TokenOutput
from ballast.core.job import JobLoad
from ballast.core.link import LinkRates
from ballast.core.model import ModelSpec
from ballast.core.pass_traffic import PassSizes, pass_traffic
from ballast.core.request import Submission
from ballast.core.residency_plan import ResidencyPlan, Unit
from ballast.core.settings import Slo
from ballast.policy.c2cserve_knob import KnobSetting
from ballast.policy.presets import resolve
from ballast.sim.cluster import Cluster, parse_kinds
from ballast.sim.device import SimDevice
from ballast.sim.event_heap import EventHeap
from ballast.sim.in_place import InPlaceMachine, InPlaceReads
from ballast.sim.layer_passes import Alone, Pass
from ballast.sim.link import SimLink
from ballast.sim.model_catalogue import facts


def spec(name: str) -> ModelSpec:
    slo = Slo(ttft=10.0, tpot=1.0)
    return facts("Llama-3-8b").spec(max_model_len=16384, name=name, slo=slo)


TUNED = KnobSetting()
SIZES = PassSizes.of(spec("a"))


def served(
    kinds: str, arrivals: Mapping[str, float], n: int, promote: float
) -> tuple[dict[str, list[float]], dict[str, SimDevice]]:
    """Seconds from each token to the next of one request of every model, by when it arrives; and
    the devices afterwards."""
    tokens: dict[str, list[float]] = defaultdict(list)

    def received(device: str, at: float, output: Output) -> None:
        if isinstance(output, TokenOutput):
            tokens[output.request_id].append(at)

    specs = [spec(name) for name in arrivals]
    preset = resolve("c2cserve", {"promote": promote}, placement="weights")
    cluster = Cluster(parse_kinds(kinds), specs, preset, received)
    prompt = tuple(range(100))
    cluster.run(
        Submission(id=m, model=m, prompt=prompt, max_tokens=n, arrival=at)
        for m, at in arrivals.items()
    )
    for device in cluster.devices.values():
        device.state.validate()
    found = {name: [b - a for a, b in pairwise(times)] for name, times in tokens.items()}
    return found, cluster.devices


def gaps(kinds: str, homes: str) -> dict[str, list[float]]:
    """Those gaps, one model a device, all of whose weights stay in host memory."""
    found, devices = served(kinds, dict.fromkeys(homes, 0.0), 12, promote=0)
    assert len(devices) == len(homes)
    for device in devices.values():
        assert device.state.pool.total - device.state.pool.free < 1000, "no page of weights"
    return found


def test_a_hot_model_comes_onto_free_pages_beside_its_passes() -> None:
    alone = min(gaps("GH200-96G", "a")["a"])
    found, devices = served("GH200-96G", {"a": 0.0}, 30, promote=1)
    (device,) = devices.values()
    m = device.state.models["a"]
    assert (m.weights.plan.in_place, m.preemptions) == (frozenset(), 0)
    assert max(found["a"]) < 2.2 * alone, "a copy has what passes leave of the link"
    assert found["a"][-1] < alone / 4
    assert device.in_place["a"].link_bytes < 12 * sum(m.spec.segment_bytes), "of 31 passes"


def test_the_next_hot_model_has_the_room_of_an_idle_one() -> None:
    found, devices = served("L4", {"a": 0.0, "b": 300.0}, 40, promote=1)
    (device,) = devices.values()
    away = {name: m.weights.plan.share_away for name, m in device.state.models.items()}
    assert away["b"] < 0.1 < 0.5 < away["a"]
    assert found["b"][-1] < min(found["b"][:3]) / 3


def test_a_pass_takes_what_the_link_takes_alone_and_n_times_that_beside_others() -> None:
    link = parse_kinds("GH200-96G")[0].link.to_device
    alone = pass_traffic(SIZES, 1, 1, 0.0, 132).link / link
    (found,) = gaps("GH200-96G:slices7", "a").values()
    assert min(found) == pytest.approx(alone, rel=0.1)
    several = gaps("GH200-96G:slices7", "abcd")
    for each in several.values():
        assert sorted(each)[5] == pytest.approx(4 * alone, rel=0.1)
    apart = gaps("4xGH200-96G", "abcd")
    for each in apart.values():
        assert sorted(each)[5] == pytest.approx(alone, rel=0.1), "each host has its own link"


def reads(
    in_place: frozenset[int],
    memory: float = 1e12,
    link: float = 400e9,
    knob: KnobSetting = TUNED,
) -> tuple[InPlaceReads, EventHeap, VirtualClock]:
    """What passes of a model read, of which these units are in host memory."""
    clock = VirtualClock()
    heap = EventHeap(clock)
    model, none = spec("a"), StepCosts(1e-3, 1e-4, 0.0, 0.0, 0.0)
    units = tuple(Unit(1, n) for n in model.segment_bytes)
    plan = ResidencyPlan(units, model.n_layers, in_place=in_place)
    machine = InPlaceMachine(memory, 16, lambda spec: none)
    found = InPlaceReads(
        model, none, machine, SimLink(heap, clock, LinkRates.even(link)), lambda: plan, knob
    )
    return found, heap, clock


def run(source: InPlaceReads, heap: EventHeap, clock: VirtualClock, rows: int) -> float:
    """Seconds of a pass that prefills so many rows."""
    began = clock.now()
    seconds = source.seconds(JobLoad(rows, 1, 0, 0, 0))
    pace = Alone(heap.agenda, began, seconds)
    Pass(32, [source], pace).begin(began, 0, rows)
    while pace.end is None:
        heap.agenda.run(heap.agenda.next, float("inf"))
    clock.advance_to(pace.end)
    return pace.end - began


def test_any_mix_of_places_is_a_plan() -> None:
    n = len(spec("a").segment_bytes)
    whole, half, none = (reads(frozenset(units))[0] for units in (range(n), range(1, n, 2), ()))
    assert (whole.waits, half.waits, none.waits) == (True, True, False)
    seconds = []
    for units in (range(n), range(1, n, 2)):
        source, heap, clock = reads(frozenset(units))
        seconds.append(run(source, heap, clock, 1))
        least = pass_traffic(SIZES, 1, 1, 0.0, 16).link / 400e9
        assert seconds[0] == pytest.approx(least, rel=0.01)
    # Half of it comes over the link, the other half out of device memory at the same time.
    assert seconds[1] == pytest.approx(seconds[0] * 0.5, rel=0.1)


def test_the_knob_gives_the_link_what_device_memory_cannot_carry() -> None:
    everything = frozenset(range(len(spec("a").segment_bytes)))
    short_of_memory = reads(everything, memory=0.4e12)
    times = [run(*short_of_memory, rows=2048) for _ in range(60)]
    assert 0.3 < short_of_memory[0].knob.os_share < 0.9
    assert times[-1] < 0.75 * times[0]
    short_of_link = reads(everything, memory=0.4e12, link=5e9)
    slow = [run(*short_of_link, rows=2048) for _ in range(12)]
    assert short_of_link[0].knob.os_share == 0.0
    assert slow[-1] == pytest.approx(slow[0])
    static = reads(everything, memory=0.4e12, knob=KnobSetting(None, 0.0))
    assert [run(*static, rows=2048) for _ in range(3)] == pytest.approx([times[0]] * 3)


def test_decode_steps_do_not_move_the_knob() -> None:
    source, heap, clock = reads(frozenset(range(34)), memory=1e9)
    for _ in range(3):
        run(source, heap, clock, 1)
    assert source.knob.passes == 0
