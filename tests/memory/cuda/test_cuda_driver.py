"""Every call of the driver goes through the real bindings as far as their argument types go."""

from __future__ import annotations

import ctypes.util
import importlib
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ballast.core.errors import DeviceError, DeviceLost, OutOfMemory
from ballast.memory.cuda.calls import Attribute, Driver
from ballast.memory.cuda.driver import LEAST_BINDINGS, STICKY, CudaDriver


class Answering:
    """The real bindings without a driver: they convert all arguments, and then find none. What a
    driver would have answered is said here."""

    def __init__(self, real: Any) -> None:
        self.real = real
        self.answers: dict[str, tuple[Any, ...]] = {}
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        real = getattr(self.real, name)
        if not name.startswith("cu"):
            return real

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, arguments))
            with pytest.raises(RuntimeError, match=r"cuda|not found"):
                real(*arguments)
            status, *values = self.answers.get(name, (0, 7))
            return (self.real.CUresult(status), *values)

        return call


@pytest.fixture
def api() -> Answering:
    real = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    if ctypes.util.find_library("cuda"):
        pytest.skip("there is a driver, which would do what it is asked")
    return Answering(real)


def test_every_call_takes_these_arguments(api: Answering) -> None:
    real = api.real
    uuid, properties = real.CUuuid(), real.CUmemAllocationProp()
    properties.location.id = 1
    whole = real.CUdevResource()
    whole.sm.smCount = 132
    api.answers = {
        "cuDriverGetVersion": (0, 12090),
        "cuDeviceGetUuid": (0, uuid),
        "cuDeviceGetUuid_v2": (0, uuid),
        "cuMemGetInfo": (0, 5, 9),
        "cuCtxGetStreamPriorityRange": (0, 0, -5),
        "cuMemGetAllocationPropertiesFromHandle": (0, properties),
        "cuDeviceGetDevResource": (0, whole),
        "cuDevSmResourceSplitByCount": (0, [whole, whole], 2, whole),
    }
    d: Driver = CudaDriver(api)
    assert d.version() == (12, 9)
    assert d.count() == 7
    assert d.device(0) == 7
    assert [d.attribute(0, which) for which in Attribute] == [7] * len(Attribute)
    assert d.uuid(0) == "00000000-0000-0000-0000-000000000000"
    assert d.can_access(0, 1) is True
    assert d.retain_context(0) == 7
    d.release_context(0)
    d.set_current(7)
    assert d.free_and_total() == (5, 9)
    assert d.granularity(0) == 7
    assert d.reserve(1 << 21, 1 << 21) == 7
    d.free(1 << 40, 1 << 21)
    assert d.create(0, 1 << 21) == 7
    d.release(7)
    d.map(1 << 40, 1 << 21, 7)
    d.unmap(1 << 40, 1 << 21)
    d.set_access(1 << 40, 1 << 21, 0)
    assert d.retain_handle(1 << 40) == 7
    assert d.handle_device(7) == 1
    assert d.export_fd(7) == 7
    assert d.import_fd(3) == 7
    assert d.new_stream(-1) == 7
    assert d.priorities() == (0, -5)
    d.destroy_stream(7)
    assert d.split(0, 2) == 0
    assert api.calls[-1] == ("cuDevSmResourceSplitByCount", (2, whole, 0, 64))
    with pytest.raises(DeviceError, match="132 multiprocessors are too few for 17 groups"):
        d.split(0, 17)
    with pytest.raises(DeviceError, match="2 groups of 40"):
        d.split(0, 3)
    assert d.green_context(0, 0, 0, 2) == 7
    assert d.green_stream(7) == 7
    d.destroy_green(7)
    d.finish(7)
    d.wait_for(7, 8)
    assert d.new_event() == 7
    assert d.new_event(timed=True) == 7
    (*_, plain), (*_, timed) = api.calls[-2:]
    untimed = int(real.CUevent_flags.CU_EVENT_DISABLE_TIMING)
    assert plain[0] & untimed
    assert not timed[0] & untimed
    api.answers["cuEventElapsedTime"] = (0, 1500.0)
    assert d.elapsed(7, 8) == 1.5
    d.destroy_event(8)
    d.record(8, 7)
    assert d.is_done(8) is True
    d.wait(8)
    d.copy_to_device(1 << 40, 1 << 41, 64, 7)
    d.copy_to_host(1 << 41, 1 << 40, 64, 7)
    d.copy_within(1 << 41, 1 << 40, 64, 7)
    d.pin(1 << 41, 4096, True)
    assert d.device_pointer(1 << 41) == 7
    d.unpin(1 << 41)
    public = {name for name in vars(CudaDriver) if not name.startswith("_")}
    public -= {"lose", "when_lost"}  # which call nothing
    assert public == {n for n in vars(Driver) if n[0] != "_"} - {"lost", "lose", "when_lost"}
    # And cuInit; of two methods, what says of what.
    assert len({name for name, _ in api.calls}) == len(public) + 3


def test_memory_is_asked_for_on_the_device_and_to_be_exported(api: Answering) -> None:
    CudaDriver(api).create(3, 1 << 21)
    _, (n_bytes, properties, flags) = api.calls[-1]
    assert (n_bytes, flags, properties.location.id) == (1 << 21, 0, 3)
    assert properties.type.name == "CU_MEM_ALLOCATION_TYPE_PINNED"
    assert properties.location.type.name == "CU_MEM_LOCATION_TYPE_DEVICE"
    assert properties.requestedHandleTypes.name == "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR"


def test_errors_name_the_call_and_the_drivers_error(api: Answering) -> None:
    driver = CudaDriver(api)
    api.answers = {
        "cuMemCreate": (2, 0),
        "cuMemMap": (1,),
        "cuEventQuery": (600,),
        "cuMemRetainAllocationHandle": (1, 0),
        "cuGetErrorString": (0, b"what happened"),
    }
    with pytest.raises(OutOfMemory, match="cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY: what happened"):
        driver.create(0, 1 << 21)
    with pytest.raises(DeviceError, match="cuMemMap: CUDA_ERROR_INVALID_VALUE") as raised:
        driver.map(1 << 40, 1 << 21, 7)
    assert not isinstance(raised.value, OutOfMemory)
    assert driver.is_done(5) is False
    assert driver.retain_handle(1 << 40) is None
    api.answers["cuEventQuery"] = (400,)
    with pytest.raises(DeviceError, match="CUDA_ERROR_INVALID_HANDLE"):
        driver.is_done(5)
    assert driver.lost is None


@pytest.mark.parametrize("code", [700, 719])
def test_an_error_that_stays_loses_the_device_once(api: Answering, code: int) -> None:
    driver = CudaDriver(api)
    api.answers = {"cuEventQuery": (code,), "cuGetErrorString": (0, b"what happened")}
    seen: list[DeviceLost] = []
    driver.when_lost(seen.append)
    for _ in range(2):
        with pytest.raises(DeviceLost, match=r"cuEventQuery: CUDA_ERROR_\w+: what happened"):
            driver.is_done(5)
    assert driver.lost is not None
    assert seen == [driver.lost]
    driver.when_lost(seen.append)
    assert seen == [driver.lost] * 2, "a late listener is called at once"


def test_all_errors_that_stay_are_known(api: Answering) -> None:
    """By NVIDIA's documentation of each error."""
    documented = {int(e): " ".join((e.__doc__ or "").split()) for e in api.real.CUresult}
    stays = {
        code for code, text in documented.items() if "must be terminated and relaunched" in text
    }
    assert {700, 719} <= stays <= STICKY
    assert {
        c for c, text in documented.items() if "context cannot be used anymore" in text
    } <= STICKY
    assert set(documented) >= STICKY


@pytest.mark.parametrize("kind", [KeyError, ValueError])
def test_an_error_newer_than_the_bindings_is_an_error_like_any(
    api: Answering, kind: type[Exception]
) -> None:
    """Bindings look a status up in their enumeration: of 12.9 with KeyError, later ValueError."""

    class Older:
        def __getattr__(self, name: str) -> Any:
            return getattr(api, name)

        def cuEventQuery(self, event: int) -> None:
            raise kind(code) if kind is KeyError else kind(f"{code} is not a valid CUresult")

        def cuCtxSetCurrent(self, context: int) -> None:
            raise ValueError("no number of an error")

    driver = CudaDriver(Older())
    code = 12345
    with pytest.raises(DeviceError, match=r"cuEventQuery: error 12345.*update"):
        driver.is_done(5)
    assert driver.lost is None
    code = 721
    with pytest.raises(DeviceLost, match="error 721"):
        driver.is_done(5)
    with pytest.raises(ValueError, match="no number"):
        driver.set_current(5)


@pytest.mark.parametrize(
    ("version", "fits"), [("12.8.0", False), ("12.9.0", False), ("12.9.1", True), ("13.0", True)]
)
def test_bindings_that_hold_the_gil_are_refused(
    api: Answering, monkeypatch: pytest.MonkeyPatch, version: str, fits: bool
) -> None:
    found = {"cuda.bindings": SimpleNamespace(__version__=version), "cuda.bindings.driver": api}
    monkeypatch.setattr(importlib, "import_module", found.__getitem__)
    if fits:
        assert CudaDriver().lost is None
    else:
        with pytest.raises(DeviceError, match=f"{version} holds the GIL.*12.9.1 or newer"):
            CudaDriver()


def test_without_a_driver(api: Answering) -> None:
    with pytest.raises(DeviceError, match="cuInit"):
        CudaDriver(api.real)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(DeviceError, match=r"pip install 'ballast-serve\[cuda\]'"):
        CudaDriver()


def test_the_bindings_that_are_asked_for_are_those_that_are_taken() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    least = ".".join(map(str, LEAST_BINDINGS))
    assert f"cuda-bindings>={least},<14" in project["optional-dependencies"]["cuda"]
