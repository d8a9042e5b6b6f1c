"""Engines of a profile: how they are named, what their host adds, what they were fitted to."""

from __future__ import annotations

from pathlib import Path

import pytest

from ballast.core.errors import ConfigError
from ballast.core.job import JobLoad
from ballast.core.units import MiB
from ballast.sim.cost_switches import CostSwitches
from ballast.sim.model_catalogue import facts
from ballast.sim.profile import device_profile
from ballast.sim.roofline import AllReduce, EngineHostCosts, KernelReach, Sizes, step_costs
from ballast.sim.toml_file import as_toml
from scripts.fit_engines import ACTIVATIONS, ON, STEPS
from tests.sim.test_roofline import HARDWARE

REACH = KernelReach(
    layer_seconds=2e-5,
    reading=1.25,
    start=0.5,
    arithmetic=1.5,
    attention=2.0,
    tile=1.0,
    source="a test",
)
SIZES = Sizes.of_facts(facts("Llama-3-8b"))
READING = 1.25 * SIZES.pass_bytes / 2e12
DEVICE = 32 * 2e-5 + READING
ONE = JobLoad(0, 0, 0, 1, 0)


def test_a_hosts_work_comes_on_top_or_goes_on_beside_the_device() -> None:
    idle = step_costs(SIZES, HARDWARE, REACH, EngineHostCosts(step_seconds=0.0))
    assert idle.of(ONE) == pytest.approx(DEVICE)
    after = step_costs(SIZES, HARDWARE, REACH, EngineHostCosts(step_seconds=3e-3))
    assert after.of(ONE) == pytest.approx(DEVICE + 3e-3)
    beside = step_costs(SIZES, HARDWARE, REACH, EngineHostCosts(step_seconds=3e-3, steps_ahead=1))
    assert beside.of(ONE) == pytest.approx(DEVICE)
    slow = step_costs(SIZES, HARDWARE, REACH, EngineHostCosts(step_seconds=0.1, steps_ahead=1))
    assert slow.of(ONE) == pytest.approx(0.1)


def test_launches_bound_a_step_unless_it_is_a_graph() -> None:
    eager = step_costs(
        SIZES, HARDWARE, REACH, EngineHostCosts(step_seconds=0.0, layer_seconds=1e-3)
    )
    assert eager.of(ONE) == pytest.approx(32e-3)
    graphs = EngineHostCosts(step_seconds=0.0, layer_seconds=1e-3, graphs=True)
    replayed = step_costs(SIZES, HARDWARE, REACH, graphs)
    assert replayed.of(ONE) == pytest.approx(DEVICE)
    assert replayed.prefill_seconds(16) == pytest.approx(32e-3), "prefills are launched"


@pytest.mark.parametrize(
    "host", [EngineHostCosts(step_seconds=3e-3), EngineHostCosts(step_seconds=3e-3, steps_ahead=1)]
)
def test_a_long_prefill_covers_part_of_a_pass(host: EngineHostCosts) -> None:
    costs = step_costs(SIZES, HARDWARE, REACH, host)
    serial = 0.0 if host.steps_ahead else 3e-3
    slope = costs.prefill_seconds(8192) - 8192 * 8193 / 2 * costs.per_pair
    assert slope - 8192 * costs.per_token == pytest.approx(0.5 * DEVICE + serial)
    assert costs.per_token == pytest.approx(1.5 * 2 * SIZES.active / 300e12)


def test_a_group_reads_its_part_and_meets_twice_a_layer() -> None:
    group = AllReduce(tp=4, least=3e-5, base=3e-5, per_byte=1e-12, source="a test")
    host = EngineHostCosts(step_seconds=0.0, all_reduce=0.5)
    costs = step_costs(SIZES, HARDWARE, REACH, host, group)
    assert costs.base == pytest.approx(32 * 2e-5 + READING / 4 + 64 * 1.5e-5)
    assert costs.per_sequence == pytest.approx(64 * 1e-12 * 2 * 4096)
    launched = host.model_copy(update={"group_layer_seconds": 1e-3, "layer_seconds": 1.0})
    assert step_costs(SIZES, HARDWARE, REACH, launched, group).base == pytest.approx(32e-3)


def test_an_engine_is_named_with_its_device(tmp_path: Path) -> None:
    own = device_profile("H100-80G")
    assert own.engine == "graphs"
    eager = device_profile("h100-80g@eager")
    assert (eager.device, eager.engine) == ("H100-80G", "eager")
    assert device_profile("H100-80G@eager", "graphs") == eager, "the name goes first"
    assert device_profile("H100-80G", "eager") == eager
    assert eager.costs("Qwen2.5-7b").base == 0.00906572, "as it was measured"
    assert own.costs("Qwen2.5-7b").base < 0.7 * eager.costs("Qwen2.5-7b").base
    with pytest.raises(ConfigError, match=r"H100-80G: engine: 'eagre'.*did you mean 'eager'"):
        device_profile("H100-80G@eagre")
    folder = tmp_path / "me@here"
    folder.mkdir()
    (folder / "own.toml").write_text(as_toml(own))
    assert device_profile(folder / "own.toml") == own
    assert device_profile(f"{folder / 'own.toml'}@eager") == eager


def test_stated_decode_steps_are_within_a_tenth() -> None:
    """Two of four coefficients were fitted to them; the rest is kernels'."""
    profile = device_profile(ON)
    for step in STEPS:
        costs = profile.costs(step.model, tp=step.tp)
        assert costs.of(ONE) == pytest.approx(step.seconds, rel=0.1), step
    alone = profile.costs("Llama-3-8b")
    assert alone.of(JobLoad(0, 0, 0, 64, 64)) == pytest.approx(alone.of(ONE), rel=1e-3)


def test_stated_activations_are_met() -> None:
    profile = device_profile(ON)
    for model, seconds in ACTIVATIONS:
        spec = facts(model).spec(max_model_len=2048)
        used = profile.of([spec])
        assert used.pages is not None
        mapping = spec.weight_bytes / (2 * MiB) * used.pages.map
        moving = spec.weight_bytes / used.moving(2 * MiB).to_device
        assert mapping + moving == pytest.approx(seconds, rel=0.02)
        unmapped = CostSwitches(without=("mapping",)).of(used).moving(2 * MiB)
        assert spec.weight_bytes / unmapped.to_device == pytest.approx(seconds, rel=0.02)
        assert spec.weight_bytes / profile.link.to_device < 0.5 * seconds


def test_messages_of_many_sequences_take_the_engines_own_all_reduces() -> None:
    group = AllReduce(tp=8, least=3e-5, base=3e-5, per_byte=5e-12, source="a test")
    plain, twice = (
        step_costs(
            SIZES, HARDWARE, REACH, EngineHostCosts(step_seconds=0.0, all_reduce_bytes=n), group
        )
        for n in (1.0, 2.0)
    )
    message = 2 * SIZES.layers * group.per_byte * 2 * SIZES.hidden
    assert twice.base == plain.base, "of few bytes, it is the least time"
    assert twice.per_sequence - plain.per_sequence == pytest.approx(message)
    assert twice.per_token - plain.per_token == pytest.approx(message)


def test_groups_of_eight_exchange_as_long_as_was_measured() -> None:
    """80 layers of 8,192 for 64 sequences: 1 MiB, 19.3 us in a graph on H100s."""
    profile = device_profile("H100-80G")
    host, (group,) = profile.serving.host, [a for a in profile.all_reduce if a.tp == 8]
    assert host is not None
    seconds = host.all_reduce * group.least + host.all_reduce_bytes * group.per_byte * MiB
    assert seconds == pytest.approx(19.3e-6, rel=0.2)
