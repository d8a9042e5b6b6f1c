"""Profiles by name: what comes with Ballast, what a user's file may say, what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ballast.bench.tables import forecast_text
from ballast.core.errors import ConfigError
from ballast.core.event import Output
from ballast.core.job import JobLoad
from ballast.core.link import LinkRates
from ballast.core.request import Submission
from ballast.core.settings import DeviceSettings, FleetSettings
from ballast.core.units import GiB, MiB
from ballast.policy.presets import resolve
from ballast.sim.cluster import SERVED, Cluster, parse_kinds
from ballast.sim.job_spread import JobSpread
from ballast.sim.machine_profile import MachineProfile
from ballast.sim.model_catalogue import catalogue, facts
from ballast.sim.page_costs import PageCosts
from ballast.sim.peer_costs import PeerCosts
from ballast.sim.profile import device_files, device_profile, profile_of
from ballast.sim.profile_tables import MeasuredCapacity
from ballast.sim.roofline import Sizes
from ballast.sim.simulate import simulate
from ballast.sim.toml_file import as_toml

DEVICES = ["A10", "A100-80G", "GB200", "GH200-96G", "H100-80G", "H20-96G", "H200", "H800", "L4"]
OWN = """
device = "here"
engine = "ballast"

[engines.ballast]
served_by = "ballast, on one lane"
overhead_seconds = 0.001

[link]
to_device = 4e9
to_host = 3e9
to_device_mixed = 2e9
to_host_mixed = 1.5e9
source = "calibrated"

[sources.calibrated]
artifact = "this machine"
licence = "own"
engine = "ballast"

[[measured]]
model = "mine"
source = "calibrated"
costs = { base = 2e-3, per_token = 5e-5, per_sequence = 2e-4, per_context = 1e-7, per_pair = 1e-9 }
"""


def written(directory: Path, text: str) -> Path:
    file = directory / "own.toml"
    file.write_text(text)
    return file


def test_public_devices_are_there() -> None:
    assert set(DEVICES) <= set(device_files())
    for name in device_files():
        assert device_profile(name).device == name
    assert device_profile("h100-80g") is device_profile("H100-80G")


@pytest.mark.parametrize("engine", ["graphs", "eager"])
@pytest.mark.parametrize("device", DEVICES)
def test_every_device_knows_every_model(device: str, engine: str) -> None:
    """More work takes longer; a decode step takes at least as long as the peaks allow."""
    profile = device_profile(device, engine)
    assert profile.hardware is not None
    for name, model in catalogue().items():
        costs = profile.costs(name)
        step = costs.of(JobLoad(0, 0, 0, 1, 512))
        assert costs.of(JobLoad(0, 0, 0, 100, 51200)) > step, name
        assert costs.prefill_seconds(4096) > costs.prefill_seconds(512) > 0, name
        sizes = Sizes.of_facts(model)
        read = sizes.pass_bytes - sizes.not_chosen * sizes.expert_bytes
        assert step > read / profile.hardware.memory_bandwidth, name


def test_a_measured_model_is_found_by_its_name_and_by_its_shape() -> None:
    profile = device_profile("A100-80G@eager")
    (row,) = (r for r in profile.measured if r.model == "Llama-2-7b")
    assert profile.costs("llama-2-7B").base == row.costs.base
    assert profile.costs("LWM-1M-7b") == profile.costs("Llama-2-7b")
    spec = facts("Llama-2-7b").spec(name="mine", max_model_len=2048)
    assert profile.costs(spec) == profile.costs("Llama-2-7b")
    assert profile.costs("LLaMA-7b") != profile.costs("Llama-2-7b")


def test_a_model_nobody_measured_gets_the_roofline() -> None:
    profile = device_profile("H100-80G")
    small, large = profile.costs("Qwen2.5-3b"), profile.costs("Qwen3-14b")
    assert small.base < large.base
    spec = facts("Qwen3-14b").spec(max_model_len=2048)
    assert profile.costs(spec).base == pytest.approx(large.base, rel=1e-3)


def test_a_prefill_nobody_measured_gets_the_rooflines() -> None:
    """Those of Yi-1.5-6b on an H800 were disturbed, and dropped."""
    profile = device_profile("H800@eager")
    (row,) = (r for r in profile.measured if r.model == "Yi-1.5-6b-chat")
    assert row.costs.per_token is None
    costs = profile.costs("Yi-1.5-6b-chat")
    assert costs.base == row.costs.base
    assert costs.prefill_seconds(2048) < profile.costs("Yi-1.5-9b-chat").prefill_seconds(2048)


def test_fewer_multiprocessors_and_more_devices() -> None:
    profile = device_profile("A100-80G@eager")
    long = JobLoad(4096, 1, 4096 * 4097 // 2, 0, 0)
    whole = profile.costs("LLaMA-13b").of(long)
    assert profile.costs("LLaMA-13b", sm_percent=30).of(long) > 2 * whole
    assert profile.costs("LLaMA-13b", tp=4).of(long) < whole / 2
    with pytest.raises(ConfigError, match=r"LLaMA-30b.*tp 2, 100 %.*all-reduces among 8"):
        profile.costs("LLaMA-30b", tp=3)
    with pytest.raises(ConfigError, match=r"Qwen3-8b.*nothing of this model"):
        profile.costs("Qwen3-8b", sm_percent=50)


@pytest.mark.parametrize("device", ["A100-80G", "H100-80G", "H200", "H800"])
def test_a_large_model_on_more_devices_takes_less(device: str) -> None:
    profile = device_profile(device)
    long, step = JobLoad(4096, 1, 4096 * 4097 // 2, 0, 0), JobLoad(0, 0, 0, 16, 16 * 1024)
    two, eight = (profile.costs("Llama-3-70b", tp=tp) for tp in (2, 8))
    assert eight.of(long) < 0.55 * two.of(long), "messages do not become shorter"
    assert eight.of(step) < two.of(step) < profile.costs("Llama-3-70b").of(step)


def test_unknown_names_list_the_known() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'H100-80G'\? known here: A10, A100-80G"):
        device_profile("H100")
    with pytest.raises(ConfigError, match=r"did you mean 'Llama-3-8b'\? known here: .*Qwen3-8b"):
        device_profile("H200").costs("Llama3-8b")
    with pytest.raises(ConfigError, match=r"did you mean 'Qwen3-8b'"):
        facts("Qwen-3-8b")


def test_a_file_of_the_users_own(tmp_path: Path) -> None:
    profile = device_profile(written(tmp_path, OWN))
    assert profile.costs("mine").per_chunk == 0
    with pytest.raises(ConfigError, match=r"here: model: 'Llama-2-7b'.*known here: mine"):
        profile.costs("Llama-2-7b")


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("base = 2e-3", "base = -1.0", r"own.toml: measured\[0\].costs.base: -1.0"),
        ("base = 2e-3", 'base = "2 ms"', r"own.toml: measured\[0\].costs.base: '2 ms'"),
        ("per_token", "per_tokn", r"per_tokn: .*did you mean 'per_token'\?"),
        ("to_device = 4e9", "", r"own.toml: link.to_device: .*required"),
        ('device = "here"', "device = ", r"own.toml: .*must be TOML"),
        ("2e-3", "nan", r"measured\[0\].costs.base: nan.*finite"),
        (
            'engine = "ballast"\n\n[e',
            'engine = "x"\n\n[e',
            r"engines: .*the engine is 'x', of which",
        ),
        ('engine = "ballast"\n\n[[', 'engine = "x"\n\n[[', r"sources: .*'x'.*known here: ballast"),
        ('source = "calibrated"\ncosts', 'source = "x"\ncosts', r"measured: .*known here: calibr"),
        ("overhead_seconds", "overhead", r"engines.ballast.overhead: .*did you mean 'overhead_sec"),
    ],
)
def test_a_faulty_file_is_named_with_its_key(tmp_path: Path, old: str, new: str, key: str) -> None:
    assert old in OWN
    with pytest.raises(ConfigError, match=key):
        device_profile(written(tmp_path, OWN.replace(old, new)))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none.toml.*cannot be read"):
        device_profile(tmp_path / "none.toml")


def test_a_measured_machine_is_a_clusters_device(tmp_path: Path) -> None:
    """With the memory, pages and steps that it was measured with; without them it is refused."""
    specs = [facts("Qwen2.5-3b").spec(name="mine", max_model_len=2048)]
    served = DeviceSettings(budget_bytes=9 * GiB, page_bytes=MiB, step_tokens=256, step_logits=64)
    costs = device_profile("L4").of(specs).costs
    measured = MachineProfile(
        costs=costs,
        link=LinkRates.even(1e9),
        overhead=1e-4,
        wake=2e-4,
        settling=(3e-4, 1e-4),
        switch=4e-4,
        switch_back=1e-4,
        turn=5e-4,
        page_seconds=1e-5,
        pages=PageCosts(map=2e-6, unmap=8e-6, kv=False, borrow=1e-6, give_back=3e-6),
        peers=PeerCosts(
            message=2e-4,
            start=1.5,
            cold_start=4.0,
            prepare=6.0,
            read=5e9,
            home=4e9,
            borrow=1e-6,
            give_back=3e-6,
        ),
        spread=JobSpread(quantiles=(0.5, 1.5)),
    )
    file = written(tmp_path, as_toml(profile_of("here", measured, served)))
    read = device_profile(file).of(specs)
    assert replace(read, costs=costs) == measured
    assert read.costs["mine"].base == pytest.approx(costs["mine"].base, rel=1e-5)
    cluster = Cluster(parse_kinds(f"2x{file}"), specs, resolve("balloon"), lambda *_: None, SERVED)
    (device,) = cluster.devices.values()
    assert device.state.settings == replace(served, name="here:0")
    without = parse_kinds(str(written(tmp_path, OWN)))
    with pytest.raises(ConfigError, match=r"here.*neither `hardware` nor `served`"):
        Cluster(without, specs, resolve("balloon"), lambda *_: None)


def test_a_file_that_knows_one_kind_of_switch_has_it_for_both(tmp_path: Path) -> None:
    specs = [facts("Qwen2.5-3b").spec(name="mine", max_model_len=2048)]
    measured = MachineProfile(
        costs=device_profile("L4").of(specs).costs,
        link=LinkRates.even(1e9),
        overhead=1e-4,
        switch=4e-4,
        switch_back=1e-4,
    )
    text = as_toml(profile_of("here", measured, DeviceSettings(budget_bytes=9 * GiB)))
    older = "\n".join(line for line in text.splitlines() if "switch_back" not in line)
    assert older.count("switch_seconds") == 1
    assert device_profile(written(tmp_path, older)).of(specs).switch_back == 4e-4


def test_a_profile_drives_a_simulation() -> None:
    specs = [facts("Llama-2-7b").spec(max_model_len=2048)]
    device = DeviceSettings(budget_bytes=40 * GiB, page_bytes=2 * MiB)
    fleet = FleetSettings(models=(), device=device, preset="balloon")
    result: list[tuple[float, Output]] = []
    asked = Submission(
        id="r", model="Llama-2-7b", prompt=(1,) * 256, max_tokens=20, ignore_eos=True
    )
    profile = device_profile("A100-80G").of(specs)
    moving = profile.moving(2 * MiB).to_device
    simulate(fleet, specs, [asked], profile, lambda now, output: result.append((now, output)))
    costs = profile.costs["Llama-2-7b"]
    assert profile.pages is not None
    mapping = specs[0].weight_bytes / (2 * MiB) * profile.pages.map
    load = mapping + specs[0].weight_bytes / moving
    steps = costs.prefill_seconds(256) + 19 * costs.of(JobLoad(0, 0, 0, 1, 266))
    assert result[-1][0] == pytest.approx(load + steps + profile.answer, rel=0.01)


def test_a_forecast_says_how_far_simulations_were_from_published_runs() -> None:
    own = forecast_text(device_profile("H100-80G"))
    assert "published runs of graphs on H100-80G, median and worst: on 1 device TTFT +2 %" in own
    assert "on 4 devices TTFT -6 % (-45), TPOT -4 % (-5), 4 runs." in own
    assert "Not held, or off: groups of eight" in own
    prompts_first = forecast_text(device_profile("H100-80G@sglang"))
    assert prompts_first.startswith("Not held, or off: any run of it")
    other = forecast_text(device_profile("A100-80G"))
    assert "on H100-80G (none is known on A100-80G), median and worst: on 1 device" in other
    assert forecast_text(device_profile("A100-80G@eager")) == (
        "No run of eager on A100-80G is known that simulations could be held against."
    )


def test_a_profile_says_how_far_simulated_capacity_was_from_the_live_one(tmp_path: Path) -> None:
    profile = device_profile("L4")
    assert profile.capacity_errors == {}
    assert "Simulated capacity" not in forecast_text(profile)
    rows = [
        MeasuredCapacity(preset="swap", live=2.0, simulated=2.5, source="a test"),
        MeasuredCapacity(preset="balloon", live=4.0, simulated=3.6, source="a test"),
    ]
    file = tmp_path / "own.toml"
    file.write_text(as_toml(profile.model_copy(update={"capacity": rows})), encoding="utf-8")
    read = device_profile(file)
    assert read.capacity_errors == pytest.approx({"swap": 0.25, "balloon": -0.1})
    assert "swap +25%, balloon -10%" in forecast_text(read)
