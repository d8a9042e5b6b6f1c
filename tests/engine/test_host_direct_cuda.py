"""Weights that a GPU's kernels read in host memory, over the stand-in of its driver.

Where nothing is mapped on the device, reading ends the process; what is read on the host is found
at addresses that are mapped as long as it is pinned.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ballast.bench.inprocess import InProcess
from ballast.core.errors import ConfigError
from ballast.core.settings import FleetSettings
from ballast.core.units import MiB
from ballast.core.view import Residency
from ballast.engine.views import device_view
from ballast.live import cuda_machine
from ballast.live.cuda_machine import NOT_LOCKED
from ballast.live.cuda_reads import KernelReads
from ballast.models.gpu.executor import GpuExecutor
from ballast.policy.presets import preset_of, resolve
from tests.engine.checkpoints import make_base_and_tuned, make_llama
from tests.engine.gpus import beside, on_gpu, serving
from tests.engine.test_host_direct import RandomPlaces, check_tokens
from tests.engine.test_partial_residency import rounds
from tests.engine.test_rotating import with_path
from tests.live.test_live_device import NAMES, asked, fleet, need
from tests.memory.fake_cuda import FakeDriver


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    monkeypatch.setattr(cuda_machine, "MEASURED_BYTES", MiB)
    made = FakeDriver(n_bytes=1 << 30, bandwidth=1e9)
    yield made
    assert made.is_clean(), "something is left of the device"
    assert not made.device_pointers


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {n: make_llama(root / n, i, num_hidden_layers=4) for i, n in enumerate(NAMES)}


def with_options(settings: FleetSettings, **options: float) -> FleetSettings:
    return replace(settings, options=options)


@pytest.mark.parametrize("impl", ["fused", "generic"])
def test_no_token_changes(tmp_path: Path, driver: FakeDriver, impl: str) -> None:
    base, tuned = make_base_and_tuned(tmp_path)
    other = make_llama(tmp_path / "other", 7, num_hidden_layers=5)
    paths = dict(zip(NAMES, (base, tuned, other), strict=True))
    waves = [[replace(r, max_tokens=24) for r in wave] for wave in rounds(2)]
    with InProcess(with_path(fleet(paths), "generic", "plain")) as server:
        alone = {id: a for wave in waves for id, a in server.generate(wave).items()}
    settings = on_gpu(with_path(fleet(paths, preset="ballast"), impl, "plain"))
    settings = with_options(settings, in_place=1)
    with serving(beside(settings, need(paths)), driver) as server:
        check_tokens(server, RandomPlaces(resolve("balloon").memory), waves, alone)


@pytest.mark.parametrize("promote", [0, 1])
def test_models_that_do_not_fit_are_served_together_from_host_memory(
    paths: dict[str, Path], driver: FakeDriver, promote: int
) -> None:
    requests = asked(2)
    with InProcess(fleet(paths)) as server:
        alone = server.generate(requests)
        weights = min(m.weights.pages for m in server.device.state.models.values())
    settings = on_gpu(fleet(paths, preset="c2cserve"))
    with serving(beside(with_options(settings, promote=promote), weights + 4), driver) as server:
        answers = server.generate(requests)
        server.drain()
        state = server.device.state
        state.validate()
        for m in state.models.values():
            run = server.device.executors[m.spec.name][0]
            assert isinstance(run, GpuExecutor)
            assert isinstance(run.barriers, KernelReads)
            if not promote:
                assert m.residency is Residency.RESIDENT
                assert state.pool.ledger.owned(m.weights.owner) == m.weights.present_pages == 0
                assert run._reads.units == frozenset(range(len(m.plan.units)))
                pointers = run._pointers
                assert pointers is not None
                assert set(pointers) <= set(driver.device_pointers.values())
    for id, answer in alone.items():
        assert answers[id].tokens == answer.tokens, id


def test_a_model_that_cannot_be_page_locked_is_refused(
    paths: dict[str, Path], driver: FakeDriver
) -> None:
    settings = beside(on_gpu(fleet(paths, preset="c2cserve")), 64)
    driver.fail("pin", after=1)  # the first is of the memory by which rates are measured
    with serving(settings, driver) as server:
        assert NOT_LOCKED in server.device.failed["a"]
        assert set(server.device.specs) == {"b", "c"}
        answers = server.generate(asked(1, models=("b", "c")))
    assert all(a.finished for a in answers.values())


def test_a_device_that_cannot_lock_all_reads_nothing_in_place(
    paths: dict[str, Path], driver: FakeDriver
) -> None:
    """Where the preset can do without it."""
    settings = on_gpu(fleet({"a": paths["a"]}, preset="ballast"))
    settings = beside(with_options(settings, in_place=1), 256)
    for locked in (True, False):
        if not locked:
            driver.fail("device_pointer")
        with serving(settings, driver) as server:
            assert device_view(server.device.state).reads_host is locked
            assert server.generate(asked(1, models=("a",)))["a0"].finished


def test_rates_that_cannot_be_measured_leave_the_knob_as_it_is(
    paths: dict[str, Path], driver: FakeDriver
) -> None:
    settings = beside(on_gpu(fleet({"a": paths["a"]}, preset="c2cserve")), 64)
    driver.fail("pin")
    with serving(settings, driver) as server:
        kernels = server.device.machine.host_kernels
        assert kernels is not None
        assert not kernels.tunes
        assert server.generate(asked(1, models=("a",)))["a0"].finished


def test_devices_of_several_ranks_are_refused(paths: dict[str, Path]) -> None:
    settings = on_gpu(fleet(paths, preset="c2cserve"))
    device = replace(settings.device, tensor_parallel=2)
    with pytest.raises(ConfigError, match="devices of one rank"):
        preset_of(replace(settings, device=device))


def test_a_preset_that_reads_nothing_in_place_has_no_part_of_it(
    paths: dict[str, Path], driver: FakeDriver
) -> None:
    settings = beside(on_gpu(fleet({"a": paths["a"]})), 256)
    with serving(settings, driver) as server:
        assert server.device.machine.host_kernels is None
        assert not device_view(server.device.state).reads_host
        assert server.generate(asked(1, models=("a",)))["a0"].finished
    assert "device_pointer" not in driver.calls
