"""List the GPUs and MIG slices of this machine, by NVML. Read-only: changes no setting of a GPU.

Used by the GPU machine to find its device, and by `doctor`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from ballast.core.capability import GpuReach
from ballast.core.errors import DeviceError, install_extra
from ballast.memory.cuda.calls import Attribute, Driver

_LANE_BYTES_PER_SECOND = {1: 250e6, 2: 500e6, 3: 985e6, 4: 1969e6, 5: 3938e6, 6: 7563e6}
"""Bandwidth of a PCIe lane in one direction, by generation, after the line code."""
_READ, _OVER_NVLINK = 0, 2
"""NVML_P2P_CAPS_INDEX_...: in some versions of pynvml the first is a tuple."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU or a MIG slice. Attributes that NVML does not report are None."""

    uuid: str
    """UUID with the prefix `GPU-` or `MIG-`, as in CUDA_VISIBLE_DEVICES."""
    name: str
    memory_bytes: int
    free_bytes: int
    multiprocessors: int | None
    """Number of multiprocessors; NVML does not report that of a whole GPU."""
    pcie: tuple[int, int] | None
    """Generation and width, the best that device and slot have in common; less at rest."""
    nvlinks: int
    """Number of NVLinks that are up."""
    nvlink_version: int | None
    reads: tuple[str, ...]
    """GPUs whose memory it can use in place."""
    reads_over_nvlink: tuple[str, ...]
    slice_of: str | None = None
    """GPU to which a MIG slice belongs; None: it is a whole GPU."""
    ordinal: int | None = None
    """CUDA's ordinal in this process; None: this process may not use it."""

    @property
    def pcie_bytes_per_second(self) -> float | None:
        """Peak rate of PCIe in one direction; copies reach less, which must be measured."""
        if self.pcie is None or self.pcie[0] not in _LANE_BYTES_PER_SECOND:
            return None
        return _LANE_BYTES_PER_SECOND[self.pcie[0]] * self.pcie[1]


def find_gpus(driver: Driver | None = None, nvml: Any = None) -> list[Gpu]:
    """Find all GPUs; of a GPU that is divided into slices, the slices.

    With a `driver`, multiprocessors and ordinals are text, too. `nvml` takes the place of `pynvml`.
    Raises DeviceError without that package, or without an NVIDIA driver.
    """
    nvml = _pynvml() if nvml is None else nvml
    with _started(nvml):
        try:
            handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
            found = [gpu for handle in handles for gpu in _look(nvml, handle, handles)]
        except nvml.NVMLError as error:
            raise DeviceError("nvml", str(error)) from error
    return found if driver is None else [_as_seen_by(driver, gpu) for gpu in found]


def reach_of(driver: Driver, ordinal: int) -> GpuReach:
    """Return whose memory a GPU can use in place. Raises DeviceError."""
    device = driver.device(ordinal)
    others = (driver.device(i) for i in range(driver.count()) if i != ordinal)
    peers = (driver.uuid(other) for other in others if driver.can_access(device, other))
    return GpuReach(driver.uuid(device), tuple(peers))


def driver_version(nvml: Any = None) -> str:
    """Version of the NVIDIA driver. Raises DeviceError without one."""
    nvml = _pynvml() if nvml is None else nvml
    with _started(nvml):
        return _text(nvml.nvmlSystemGetDriverVersion())


@contextmanager
def _started(nvml: Any) -> Iterator[None]:
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise DeviceError("nvmlInit", str(error)) from error
    try:
        yield
    finally:
        with suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def _look(nvml: Any, handle: Any, all_handles: list[Any]) -> Iterator[Gpu]:
    gpu = _whole(nvml, handle, all_handles)
    mode = _query(nvml, (0, 0), "nvmlDeviceGetMigMode", handle)
    if mode[0] != nvml.NVML_DEVICE_MIG_ENABLE:
        yield gpu
        return
    for i in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        part = _query(nvml, None, "nvmlDeviceGetMigDeviceHandleByIndex", handle, i)
        if part is not None:
            yield _slice(nvml, part, gpu)


def _whole(nvml: Any, handle: Any, all_handles: list[Any]) -> Gpu:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    generation = _query(nvml, 0, "nvmlDeviceGetMaxPcieLinkGeneration", handle)
    width = _query(nvml, 0, "nvmlDeviceGetMaxPcieLinkWidth", handle)
    up = [
        link
        for link in range(nvml.NVML_NVLINK_MAX_LINKS)
        if _query(nvml, 0, "nvmlDeviceGetNvLinkState", handle, link) == nvml.NVML_FEATURE_ENABLED
    ]
    version = _query(nvml, None, "nvmlDeviceGetNvLinkVersion", handle, up[0]) if up else None
    uuid = _uuid(nvml, handle)
    others = [other for other in all_handles if _uuid(nvml, other) != uuid]
    return Gpu(
        uuid=uuid,
        name=_text(nvml.nvmlDeviceGetName(handle)),
        memory_bytes=int(memory.total),
        free_bytes=int(memory.free),
        multiprocessors=None,
        pcie=(int(generation), int(width)) if generation and width else None,
        nvlinks=len(up),
        nvlink_version=version,
        reads=_peers(nvml, handle, others, _READ),
        reads_over_nvlink=_peers(nvml, handle, others, _OVER_NVLINK),
    )


def _slice(nvml: Any, part: Any, gpu: Gpu) -> Gpu:
    """Slices cannot use each other's memory in place, whatever their GPUs can."""
    memory = nvml.nvmlDeviceGetMemoryInfo(part)
    attributes = _query(nvml, None, "nvmlDeviceGetAttributes", part)
    return replace(
        gpu,
        uuid=_uuid(nvml, part),
        name=_text(nvml.nvmlDeviceGetName(part)),
        memory_bytes=int(memory.total),
        free_bytes=int(memory.free),
        multiprocessors=None if attributes is None else int(attributes.multiprocessorCount),
        nvlinks=0,
        nvlink_version=None,
        reads=(),
        reads_over_nvlink=(),
        slice_of=gpu.uuid,
    )


def _peers(nvml: Any, handle: Any, others: list[Any], by: int) -> tuple[str, ...]:
    statuses = [_query(nvml, None, "nvmlDeviceGetP2PStatus", handle, other, by) for other in others]
    ok = nvml.NVML_P2P_STATUS_OK
    return tuple(_uuid(nvml, o) for o, status in zip(others, statuses, strict=True) if status == ok)


def _as_seen_by(driver: Driver, gpu: Gpu) -> Gpu:
    for ordinal in range(driver.count()):
        device = driver.device(ordinal)
        if gpu.uuid.partition("-")[2] == driver.uuid(device):
            multiprocessors = driver.attribute(device, Attribute.MULTIPROCESSORS)
            return replace(gpu, ordinal=ordinal, multiprocessors=multiprocessors)
    return gpu


def _query(nvml: Any, otherwise: Any, name: str, *arguments: Any) -> Any:
    """Call NVML; `otherwise` where this GPU does not support the call."""
    try:
        return getattr(nvml, name)(*arguments)
    except nvml.NVMLError:
        return otherwise


def _uuid(nvml: Any, handle: Any) -> str:
    return _text(nvml.nvmlDeviceGetUUID(handle))


def _text(text: str | bytes) -> str:
    return text.decode() if isinstance(text, bytes) else text


def _pynvml() -> Any:
    try:
        return importlib.import_module("pynvml")
    except ImportError as error:
        raise DeviceError("import pynvml", f"{error}; {install_extra('cuda')}") from error
