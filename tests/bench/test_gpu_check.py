"""`scripts/gpu_check` where there is no GPU, and its parts as far as a stand-in lets them run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import LlamaConfig

from ballast.core.clock import Clock
from ballast.core.event import Event
from ballast.core.settings import DeviceSettings, FleetSettings
from ballast.core.units import KiB, MiB
from ballast.kernels.plain.attention import PlainAttention
from ballast.live import cuda_machine
from ballast.live.cuda_machine import CudaMachine
from ballast.live.machine import MakeMachine
from ballast.models.gpu.graphs import GraphCache
from benchmarks import elastic_overhead, gpu_check, gpu_pages, gpu_speed
from benchmarks.exactness import make_llama
from benchmarks.gpu_apart import Findings, Part, apart, inside
from benchmarks.gpu_device import Gpu, bytes_of
from benchmarks.gpu_fleet import proved
from benchmarks.gpu_in_place import in_place
from benchmarks.gpu_model import Random, reference, spec_of
from tests.engine.gpus import AtOnce, OnHost
from tests.memory.fake_cuda import FakeDriver
from tests.models.fake_graphs import Recorders, StaticAttention

ROOT = Path(__file__).parents[2]
PAGE = 64 * KiB


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_it_would_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu_check.main(["--json", str(tmp_path / "found.json")]) == 2
    result = capsys.readouterr().err
    assert "no GPU" in result
    assert all(part.name in result for part in gpu_check.PARTS)
    assert not (tmp_path / "found.json").exists()
    assert max(part.seconds for part in gpu_check.PARTS) < gpu_check.SECONDS < 600


def test_the_script_needs_no_server() -> None:
    """What images with a GPU often lack is not asked for."""
    code = (
        "import sys\n"
        "lacking = 'fastapi zmq ortools uvicorn msgspec pydantic pynvml typer llguidance'\n"
        "for name in lacking.split():\n"
        "    sys.modules[name] = None\n"
        "import benchmarks.gpu_check, benchmarks.gpu_pages, benchmarks.gpu_speed\n"
        "import benchmarks.elastic_overhead\n"
    )
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_a_part_that_hangs_or_dies_costs_only_itself(tmp_path: Path) -> None:
    program = (
        "import json, os, pathlib, subprocess, sys, time\n"
        "name, file = sys.argv[1], pathlib.Path(sys.argv[2])\n"
        "if name != 'hangs': file.write_text(json.dumps({'seen': name}))\n"
        "if name == 'hangs':\n"
        "    subprocess.Popen(['sleep', '600'])\n"
        "    time.sleep(600)\n"
        "if name == 'dies': os.abort()\n"
    )
    saved: list[list[str]] = []

    def save(found: Mapping[str, Any]) -> None:
        saved.append(list(found))

    def command(name: str, file: Path) -> list[str]:
        if name == "hangs":  # has found something before, however slowly it starts
            file.write_text(json.dumps({"seen": name}))
        return [sys.executable, "-S", "-c", program, name, str(file)]

    parts = [Part("hangs", 1), Part("dies", 60), Part("good", 60), Part("late", 1000)]
    with open(tmp_path / "log", "w") as log:
        found = apart(parts[:3], command, 200, tmp_path, log, save)
        late = apart(parts[3:], command, 5, tmp_path, log, save)
    assert found["hangs"]["seen"] == "hangs"
    assert found["hangs"]["broke_off"] == "killed after 1 seconds"
    assert "ended with -6" in found["dies"]["broke_off"]
    assert found["good"].keys() == {"seen", "took_seconds"}
    assert "seconds were left" in late["late"]["not_run"]
    assert saved == [["hangs"], ["hangs", "dies"], ["hangs", "dies", "good"], ["late"]]


def test_what_was_found_before_a_part_broke_off_is_kept(tmp_path: Path) -> None:
    def part(found: Findings) -> None:
        found["one"] = 1
        raise RuntimeError("it is hot")

    assert inside(part, tmp_path / "found.json") == 1
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["one"], found["broke_off"]) == (1, "RuntimeError: it is hot")
    assert "raise RuntimeError" in found["where"]


@pytest.fixture
def found(tmp_path: Path) -> Findings:
    return Findings(tmp_path / "found.json")


def small() -> LlamaConfig:
    return LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )


class StandIn:
    """A `Gpu` that is none: launches end at once, on the CPU."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.driver = FakeDriver(n_bytes=1 << 30)
        self.context = self.driver.retain_context(0)
        self.driver.set_current(self.context)

    free = 1 << 40

    def bandwidth(self) -> float:
        return 1e9

    link_bandwidth = bandwidth

    def compute(self) -> OnHost:
        return OnHost()

    def held(self) -> tuple[int, int]:
        return 0, 0

    def give_back(self) -> None:
        pass

    def busy(self, seconds: float) -> AbstractContextManager[Callable[[], bool]]:
        return nullcontext(lambda: True)

    def seconds(self, work: Callable[[], object], times: int) -> float:
        work()
        return 1e-3

    def replayed(self, work: Callable[[], object]) -> Callable[[], object]:
        return work

    def clean(self) -> bool:
        self.driver.release_context(0)
        return self.driver.is_clean()


def test_pages_are_timed_and_given_back(found: Findings) -> None:
    gpu = StandIn()
    gpu_pages.pool(cast(Gpu, gpu), found)
    assert found["microseconds"]["both"] > 0
    assert found["microseconds_of_32_MiB"]["both"] > 0
    assert gpu.clean()


@pytest.mark.parametrize("waits", [True, False])
def test_a_driver_whose_first_unmapping_waits_for_a_kernel_is_found_out(
    found: Findings, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """Once it has waited, the kernel has ended: later calls are as quick as ever."""
    gpu, now, ends = StandIn(), [0.0], [0.0]

    class Busy:
        def __enter__(self) -> Callable[[], bool]:
            ends[0] = now[0] + gpu_pages.KERNEL_SECONDS
            return lambda: now[0] < ends[0]

        def __exit__(self, *_: object) -> None:
            now[0] = max(now[0], ends[0])

    def unmap(address: int, n_bytes: int) -> None:
        real(address, n_bytes)
        now[0] = max(now[0] + 1e-5, ends[0] if waits else 0.0)

    real = gpu.driver.unmap
    monkeypatch.setattr(gpu.driver, "unmap", unmap)
    monkeypatch.setattr(gpu, "busy", lambda seconds: Busy())
    monkeypatch.setattr(gpu_pages, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    gpu_pages.pool(cast(Gpu, gpu), found)
    assert found["calls_wait_for_kernels"] is waits
    beside = found["microseconds_beside_a_kernel"]
    assert beside["unmap"] == pytest.approx(10.0), "which its median hides"
    assert beside["longest_unmap"] == pytest.approx(0.5e6 if waits else 10.0)
    assert found["longest_of_kernel"] == pytest.approx(1.0 if waits else 2e-5)
    assert gpu.clean()


def test_activations_of_every_size_are_timed(found: Findings) -> None:
    gpu = StandIn()
    gpu_pages.activation(cast(Gpu, gpu), found, {"tiny": small()}, page=PAGE)
    result = found["tiny"]
    assert result["bytes"] == sum(spec_of(small()).segment_bytes)
    assert result["seconds"] > result["mapping_seconds"] > 0
    assert found["tiny_in_pages_of_1024_KiB"]["bytes"] == result["bytes"]
    assert found["pinned"]
    assert gpu.clean()


def test_steps_of_every_path_are_timed(found: Findings, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("CONTEXT", 33), ("BATCHES", (1, 2)), ("SEQUENCES", 2), ("TIMES", 1)):
        monkeypatch.setattr(gpu_speed, name, value)
    monkeypatch.setattr(gpu_speed, "PAGE", PAGE)
    monkeypatch.setattr(gpu_speed, "PREFILLS", (40,))
    gpu = StandIn()
    gpu_speed.single_model(cast(Gpu, gpu), found, {"tiny": small()}, StaticAttention)
    for impl in ("fused", "generic"):
        for batch in (1, 2):
            assert found[f"tiny_{impl}_batch_{batch}"]["same_tokens"]
        assert found[f"tiny_{impl}_prefill_40"]["same_tokens"]
    assert found["tiny_over_transformers_batch_2"] > 0
    assert gpu.clean()


def test_a_path_that_fails_leaves_the_others_their_figures(
    found: Findings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def steps(gpu: Gpu, config: LlamaConfig, bandwidth: float, impl: str, make: Any) -> Any:
        if impl == "generic":
            raise ValueError("it does not compile")
        return {"batch_1": {"seconds": 0.5, "of_roofline": 0.9}}

    monkeypatch.setattr(gpu_speed, "decode_steps", steps)
    for name, value in (("CONTEXT", 9), ("BATCHES", (1,)), ("SEQUENCES", 2), ("TIMES", 1)):
        monkeypatch.setattr(gpu_speed, name, value)
    gpu_speed.single_model(cast(Gpu, StandIn()), found, {"8B": small()})
    assert found["8B_generic_steps"]["broke_off"] == "ValueError: it does not compile"
    assert found["8B_fused_batch_1"]["goal_met"]
    assert found["8B_gemms_batch_1"]["seconds"] == 0.5
    assert found["8B_over_transformers_batch_1"] > 0
    assert gpu_check.unmet(found) == ["8B_generic_steps: ValueError: it does not compile"]


def test_exactness_is_shown_where_something_moved(
    found: Findings, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = {
        "wrong": 0,
        "tokens": 9,
        "evictions": 1,
        "preemptions": 0,
        "layers_loaded": 0,
        "kv_moves": 0,
    }

    def proved(torch_device: torch.device, dtype: str, **case: Any) -> dict[str, Any]:
        if "impl" in case:
            raise RuntimeError("it is hot")
        return {**result, "evictions": 0} if "lanes" in case else result

    monkeypatch.setattr(gpu_check, "proved", proved)
    gpu_check.exactness(cast(Gpu, StandIn()), found)
    passed = {case: of.get("passed") for case, of in found.items()}
    assert passed == {
        "float32": True,
        "bfloat16": None,
        "float32, generic path": None,
        "float32, two lanes": False,
        "float32, layers rotate": True,
        "float32, KV is swapped": True,
    }
    assert gpu_check.unmet(found) == [
        "float32, generic path: RuntimeError: it is hot",
        "float32, two lanes.passed",
    ]


def test_sampling_is_timed_and_compared(found: Findings) -> None:
    gpu = StandIn()
    gpu_speed.sampling(cast(Gpu, gpu), found, rows=3, vocab=1000, times=1)
    assert [found[name]["rows_moved"] for name in gpu_speed.ASKED] == [3, 0, 0]
    assert all(found[name]["passed"] for name in gpu_speed.ASKED)
    assert gpu.clean()


def test_a_step_is_timed_with_a_graph_and_without() -> None:
    driver, cpu = FakeDriver(n_bytes=64 * MiB), torch.device("cpu")
    cache = GraphCache(64 * MiB, Recorders())
    shape = (driver, cpu, small(), PAGE)
    made = Random(*shape, sequences=3, context=40, make=StaticAttention, graphs=cache)
    with made as model:
        work = model.decodes(3, 33)
        result = gpu_speed.with_and_without(
            lambda: gpu_speed.tokens_of(model.served.run(work)), cache, 1, lambda: (0, 0), 2
        )
        assert result["same_tokens"]
        assert cache.report().replays == 2 + 2 * gpu_speed.STEADY
        cache.cap_bytes = 0
        result = gpu_speed.with_and_without(
            lambda: gpu_speed.tokens_of(model.served.run(work[:1])), cache, 1, lambda: (0, 0), 2
        )
        assert result["seconds_without"] > 0
        assert "nothing could be recorded" in result["broke_off"]
        cache.close()
    assert driver.is_clean()


@pytest.mark.parametrize("impl", ["fused", "generic", "gemms"])
def test_weights_made_in_place_decode(impl: str) -> None:
    driver = FakeDriver(n_bytes=64 * MiB)
    config = small()
    cpu = torch.device("cpu")
    shape = (driver, cpu, config, PAGE)
    made = Random(*shape, sequences=3, context=40, make=PlainAttention, impl=impl)
    with made as model:
        assert len(model.served.run(model.decodes(3, 33))) == 3
        assert len(model.served.run(model.decodes(1, 33))) == 1
        assert model.weight_bytes == pytest.approx(bytes_of(config) - 2 * 128 * 64, abs=64 * 4)
        theirs = reference(config, 3, 33, cpu)
        theirs()
        theirs()
    assert driver.is_clean()


def on_stand_in(
    driver: FakeDriver, attention: type[PlainAttention] = PlainAttention
) -> MakeMachine:
    def make(fleet: FleetSettings, clock: Clock, post: Callable[[Event], None]) -> CudaMachine:
        return CudaMachine(fleet, clock, post, driver, OnHost(attention))

    return make


@pytest.mark.parametrize(
    "case", ["float32, two lanes", "float32, layers rotate", "float32, KV is swapped"]
)
def test_the_small_fleet_is_exact_under_pressure(case: str) -> None:
    driver = AtOnce(n_bytes=1 << 30)
    device = DeviceSettings(
        name="cuda:0", budget_bytes=1 << 30, page_bytes=PAGE, step_tokens=64, graphs=16 * MiB
    )
    result = proved(
        torch_device=torch.device("cpu"),
        device=device,
        make=on_stand_in(driver, StaticAttention),
        hidden=64,
        each=2,
        tokens=6,
        **gpu_check.CASES[case],
    )
    assert result["wrong"] == 0
    assert result["tokens"] == 3 * 2 * 6 * 2
    # Room that layers lend may be room enough.
    moved = {
        "float32, layers rotate": ("layers_loaded",),
        "float32, KV is swapped": ("kv_moves",),
    }.get(case, ("evictions", "preemptions"))
    assert sum(result[key] for key in moved) > 0
    assert driver.is_clean()


def test_the_small_fleet_reads_weights_in_host_memory(
    found: Findings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16 a CPU's products depend on other rows: those tokens are counted alone."""
    monkeypatch.setattr(cuda_machine, "MEASURED_BYTES", MiB)
    driver = AtOnce(n_bytes=1 << 30, bandwidth=1e9)
    device = DeviceSettings(name="cuda:0", budget_bytes=1 << 30, page_bytes=PAGE)
    make = on_stand_in(driver)
    in_place(cast(Gpu, StandIn()), found, device, make, hidden=64, each=2, tokens=6)
    assert driver.is_clean()
    exact = found["float32"]
    assert (exact["wrong"], exact["tokens"], exact["passed"]) == (0, 3 * 2 * 6 * 2, True)
    assert len(found) == 5
    for result in found.values():
        assert result["segments_on_host"] > 0


def test_elastic_overhead_fits_its_budget_on_a_gpu(tmp_path: Path) -> None:
    driver = FakeDriver(n_bytes=1 << 30)
    make = on_stand_in(driver)
    path = make_llama(tmp_path / "m", 0, hidden_size=32, num_hidden_layers=1)
    device = DeviceSettings(name="cuda:0", budget_bytes=1 << 30, page_bytes=PAGE)
    fixed, kv = elastic_overhead.need(path, device, make)
    load = elastic_overhead.Load(path, device, fixed + 2 * kv, once=True, make=make)
    assert load.round(elastic_overhead.CONCURRENT) > 0
    load.close()
    assert driver.is_clean()


def test_goals_missed_and_parts_that_did_not_run_are_named() -> None:
    found = {
        "machine": {"gpu": "H7", "took_seconds": 1.0},
        "pool": {"microseconds": {"map": 30.0}, "goal_met": True},
        "exactness": {"float32": {"wrong": 1, "passed": False}, "bfloat16": {"passed": None}},
        "single_model": {"8B": {"goal_met": False, "same_tokens": True}, "1B": {"not_run": "full"}},
    }
    assert gpu_check.unmet(found) == [
        "exactness.float32.passed",
        "single_model.8B.goal_met",
        "single_model.1B: full",
    ]
