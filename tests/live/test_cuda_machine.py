"""The live engine on a GPU's memory, as far as that goes without one: the driver is a stand-in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ballast.bench.inprocess import InProcess
from ballast.core.errors import ConfigError, DeviceError, DeviceLost
from ballast.core.event import FailedOutput, FinishedOutput
from ballast.core.settings import FleetSettings, ModelSettings
from ballast.core.units import KiB, MiB
from ballast.engine.sizing import GPU_LANE_BYTES
from ballast.kernels.gpu.batch import GpuBatch
from ballast.memory.cuda.calls import Attribute
from ballast.models.gpu.executor import GpuExecutor, GpuTransformersModel
from ballast.models.gpu.fused import GpuFusedModel
from tests.engine.checkpoints import make_llama
from tests.engine.gpus import OnHost, beside, on_gpu, serving
from tests.live.test_live_device import asked, fleet, need, paths  # noqa: F401
from tests.memory.fake_cuda import FakeDriver


@pytest.fixture
def driver() -> Iterator[FakeDriver]:
    made = FakeDriver(n_bytes=1 << 30)
    yield made
    assert made.is_clean(), "something is left of the device"


def tight(
    paths: dict[str, Path],  # noqa: F811
    lanes: int = 1,
    preset: str = "balloon",
    more: int = 0,
) -> FleetSettings:
    """Two of three models fit, and some long requests, and so many `more` pages."""
    return beside(on_gpu(fleet(paths, preset=preset), lanes), need(paths) + more)


@pytest.mark.parametrize("lanes", [1, 2])
def test_pinned_memory_is_freed_before_the_streams_that_copied_from_it(
    paths: dict[str, Path],  # noqa: F811
    driver: FakeDriver,
    lanes: int,
) -> None:
    """PyTorch records events on them where it frees it: on one that is gone, it ends the
    process."""
    ended: list[int | str] = []
    destroy = driver.destroy_stream

    def noted(stream: int) -> None:
        ended.append(stream)
        destroy(stream)

    driver.destroy_stream = noted  # type: ignore[method-assign]
    compute = OnHost()
    pinned: list[GpuBatch] = []

    def release() -> None:
        ended.append("pinned")
        assert pinned
        assert not any(batch._staged._stages for batch in pinned)

    compute.release_pinned = release  # type: ignore[method-assign]
    with serving(tight(paths, lanes), driver, compute) as server:
        server.generate(asked(2))
        for of_model in server.device.executors.values():
            for executor in of_model:
                assert isinstance(executor, GpuExecutor)
                pinned += [*executor._kept.values(), *executor._chunks.values()]
        used = set(compute.streams)
    assert used.isdisjoint(ended[: ended.index("pinned")])
    assert used <= set(ended)


@pytest.mark.parametrize(
    ("preset", "lanes", "impl"),
    [("swap", 1, "fused"), ("balloon", 2, "generic")],
)
def test_under_pressure_its_tokens_are_those_of_the_cpu(
    paths: dict[str, Path],  # noqa: F811
    driver: FakeDriver,
    preset: str,
    lanes: int,
    impl: str,
) -> None:
    requests = [*asked(3), *(replace(r, id=f"{r.id}-warm") for r in asked(2, 0.8))]
    requests.append(
        replace(requests[0], id="plain", sampling=replace(requests[0].sampling, logprobs=None))
    )
    generic = fleet(paths)
    models = tuple(replace(m, model_impl="generic", linear="plain") for m in generic.models)
    with InProcess(replace(generic, models=models)) as server:
        alone = server.generate(requests)
    compute = OnHost()
    pressed = tight(paths, lanes, preset)
    models = tuple(replace(m, model_impl=impl) for m in pressed.models)
    pressed = replace(pressed, models=models)
    with serving(pressed, driver, compute) as server:
        executors = server.device.executors.values()
        kind = GpuFusedModel if impl == "fused" else GpuTransformersModel
        assert all(isinstance(e, kind) for of_model in executors for e in of_model)
        answers = server.generate(requests)
        server.drain()
        device = server.device
        report, state = device.snapshot(), device.state
        for m in state.models.values():
            m.kv.validate([])
            owned = state.pool.ledger.owned(f"kv:{m.spec.name}")
            assert m.kv.book.backing.os_backed() == owned == m.kv.pages
            weights = state.pool.ledger.owned(f"weights:{m.spec.name}")
            assert m.weights.range.os_backed() == weights
        state.arena.validate()
        state.pool.validate()
        arena = state.arena.pages * device.vm.page_bytes
        assert device.machine.vm.physical_bytes() <= device.fleet.device.budget_bytes - arena
        assert driver.pinned, "weights in host memory are page-locked"
    for id, answer in answers.items():
        assert answer.tokens == alone[id].tokens, id
        assert answer.logprobs == pytest.approx(alone[id].logprobs, abs=1e-4)
    # Which of the two it takes depends on when requests end.
    assert sum(m.evictions + m.preemptions for m in report.models) > 0
    assert lanes <= len(set(compute.streams)) <= lanes * (lanes + 1) // 2


def test_a_model_comes_and_goes(paths: dict[str, Path], driver: FakeDriver) -> None:  # noqa: F811
    from ballast.core.command import Add, CommandOutcome, Remove

    first = fleet({"a": paths["a"]})
    budget = first.device.budget_bytes + GPU_LANE_BYTES
    settings = on_gpu(replace(first, device=replace(first.device, budget_bytes=budget)))
    with serving(settings, driver) as server:
        outcome: list[CommandOutcome] = []

        def carry_out(order: Add | Remove) -> None:
            server.device.command(order, outcome.append)
            server.device._command_executor._thread.submit(lambda: None).result()

        before = len(driver.pinned)
        carry_out(Add(ModelSettings(name="b", path=str(paths["b"]), dtype="float32")))
        assert len(driver.pinned) > before
        assert all(a.finished for a in server.generate(asked(2, models=("a", "b"))).values())
        carry_out(Remove("b", patience=5.0))
        assert len(driver.pinned) == before
        assert [o.code for o in outcome] == [None, None]
        assert isinstance(server.generate(asked(1, models=("a",)))["a0"].end, FinishedOutput)


def test_a_job_that_breaks_off_fails_its_requests_only(
    paths: dict[str, Path],  # noqa: F811
    driver: FakeDriver,
) -> None:
    plain = fleet(paths)
    budget = plain.device.budget_bytes + GPU_LANE_BYTES
    settings = on_gpu(replace(plain, device=replace(plain.device, budget_bytes=budget)))
    with serving(settings, driver) as server:
        victim = server.device.executors["b"][0]

        def broken(work: object) -> list[object]:
            raise DeviceError("cuEventSynchronize", "CUDA_ERROR_ASSERT")

        victim.run = broken  # type: ignore[method-assign, assignment]
        answers = server.generate(asked(2))
    for key, answer in answers.items():
        assert isinstance(answer.end, FailedOutput if key.startswith("b") else FinishedOutput)


@pytest.mark.parametrize("where", ["kernel", "record", "copy_to_device", "map"])
def test_an_error_that_stays_ends_the_loop_with_no_request_answered(
    paths: dict[str, Path],  # noqa: F811
    where: str,
) -> None:
    """Whichever thread meets it: the process is to end, and requests go on in the next one."""
    driver = FakeDriver(n_bytes=1 << 30)
    error = DeviceLost("cuEventSynchronize", "CUDA_ERROR_ILLEGAL_ADDRESS")
    server = serving(tight(paths), driver)

    def broken(work: object) -> list[object]:
        driver.fail(error=error)
        raise RuntimeError("CUDA error: an illegal memory access was encountered")  # PyTorch's

    if where == "kernel":
        for executors in server.device.executors.values():
            executors[0].run = broken  # type: ignore[method-assign, assignment]
    else:
        driver.fail(where, error=error)
    with pytest.raises(DeviceLost, match="ILLEGAL_ADDRESS"), server:
        server.generate(asked(2))
    assert driver.lost is error
    assert not any(answer.end for answer in server.answers.values())
    if where == "kernel":
        assert server.device.runner.job_since is not None, "on record: it may be to blame"


def test_what_a_gpu_cannot_have_is_said(paths: dict[str, Path]) -> None:  # noqa: F811
    settings = on_gpu(fleet({"a": paths["a"]}))

    def refused(fleet: FleetSettings, driver: FakeDriver, match: str) -> None:
        with pytest.raises(ConfigError, match=match):
            serving(fleet, driver)

    refused(settings, FakeDriver(granularity=2 * MiB), "2MiB")
    refused(
        replace(settings, device=replace(settings.device, name="cuda:3")),
        FakeDriver(),
        r"1 device\(s\)",
    )
    with pytest.raises(ConfigError, match="no GPU that CUDA can use"):
        InProcess(settings)
    with pytest.raises(DeviceError, match="VIRTUAL_MEMORY"):
        serving(settings, FakeDriver(attributes={Attribute.MAPS_MEMORY: 0}))


def test_what_only_cpus_run_is_refused_model_by_model(
    paths: dict[str, Path],  # noqa: F811
    driver: FakeDriver,
) -> None:
    first = fleet({"a": paths["a"], "b": paths["b"]})
    a, b = first.models
    budget = first.device.budget_bytes + GPU_LANE_BYTES
    device = replace(first.device, budget_bytes=budget)
    settings = replace(first, models=(a, replace(b, linear="packed")), device=device)
    with serving(on_gpu(settings), driver) as server:
        assert "linear" in server.device.failed["b"]
        assert set(server.device.specs) == {"a"}


@pytest.mark.parametrize(
    ("dtype", "impl", "invariant", "says"),
    [
        ("bfloat16", "fused", None, "`invariant: 1` of the device"),
        ("bfloat16", "fused", True, None),
        ("bfloat16", "generic", True, "generic path"),
        ("float32", "fused", None, None),
    ],
)
def test_rows_are_independent_where_it_is_asked_for_and_the_log_says_where_not(
    tmp_path: Path,
    driver: FakeDriver,
    caplog: pytest.LogCaptureFixture,
    dtype: str,
    impl: str,
    invariant: bool | None,
    says: str | None,
) -> None:
    settings = fleet({"a": make_llama(tmp_path / "a", 3)})
    models = tuple(replace(m, dtype=dtype, model_impl=impl) for m in settings.models)
    budget = 64 * MiB + GPU_LANE_BYTES
    device = replace(
        settings.device, budget_bytes=budget, page_bytes=128 * KiB, invariant=invariant
    )
    settings = on_gpu(replace(settings, models=models, device=device))
    with caplog.at_level("INFO", "ballast"), serving(settings, driver) as server:
        executor = server.device.executors["a"][0]
        assert isinstance(executor, GpuExecutor)
        assert executor._invariant is bool(invariant)
        if isinstance(executor, GpuFusedModel):
            assert executor._one_row is not invariant, "it adds in another order"
    told = [r.getMessage() for r in caplog.records if "invariant" in r.getMessage()]
    assert len(told) == (says is not None)
    assert says is None or says in told[0]


def test_bfloat16_runs(tmp_path: Path, driver: FakeDriver) -> None:
    settings = fleet({"a": make_llama(tmp_path / "a", 3)})
    models = tuple(replace(m, dtype="bfloat16") for m in settings.models)
    budget = 64 * MiB + GPU_LANE_BYTES
    device = replace(settings.device, budget_bytes=budget, page_bytes=128 * KiB)
    with serving(on_gpu(replace(settings, models=models, device=device)), driver) as server:
        answers = server.generate(asked(3, models=("a",)))
    assert all(len(a.tokens) == 40 for a in answers.values())
