"""`pynvml` without a driver: GPUs as a test describes them. It can be asked and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


class NVMLError(Exception):
    pass


@dataclass
class Board:
    uuid: str
    name: str = "NVIDIA H100 80GB HBM3"
    total: int = 80 << 30
    free: int = 79 << 30
    pcie: tuple[int, int] | None = (5, 16)
    nvlinks: int = 0
    reads: tuple[str, ...] = ()
    over_nvlink: tuple[str, ...] = ()
    slices: list[tuple[str, int, int] | None] | None = None
    """(uuid, bytes, multiprocessors) of each; None: the GPU is not cut."""
    multiprocessors: int = 132


@dataclass
class FakeNvml:
    boards: list[Board] = field(default_factory=list)
    driver: bool = True
    started: int = 0

    NVMLError = NVMLError
    NVML_DEVICE_MIG_ENABLE = 1
    NVML_FEATURE_ENABLED = 1
    NVML_NVLINK_MAX_LINKS = 36
    NVML_P2P_STATUS_OK = 0
    NVML_P2P_STATUS_NOT_SUPPORTED = 5

    def nvmlInit(self) -> None:
        if not self.driver:
            raise NVMLError("NVML Shared Library Not Found")
        self.started += 1

    def nvmlShutdown(self) -> None:
        self._need()
        self.started -= 1

    def nvmlSystemGetDriverVersion(self) -> bytes:
        self._need()
        return b"580.95.05"

    def nvmlDeviceGetCount(self) -> int:
        self._need()
        return len(self.boards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Board:
        self._need()
        return self.boards[index]

    def nvmlDeviceGetName(self, handle: Any) -> str:
        self._need()
        return str(handle.name)

    def nvmlDeviceGetUUID(self, handle: Any) -> str:
        self._need()
        return str(handle.uuid)

    def nvmlDeviceGetMemoryInfo(self, handle: Any, version: Any = None) -> Any:
        self._need()
        return SimpleNamespace(total=handle.total, free=handle.free)

    def nvmlDeviceGetMigMode(self, device: Board) -> tuple[int, int]:
        self._need()
        if "H100" not in device.name:
            raise NVMLError("Not Supported")
        return (1, 1) if device.slices is not None else (0, 1)

    def nvmlDeviceGetMaxMigDeviceCount(self, device: Board) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: Board, index: int) -> Any:
        slices = device.slices or []
        found = slices[index] if index < len(slices) else None
        if found is None:
            raise NVMLError("Not Found")
        uuid, n_bytes, sms = found
        name = f"{device.name} MIG {sms // 16}g.{n_bytes >> 30}gb"
        return SimpleNamespace(uuid=uuid, name=name, total=n_bytes, free=n_bytes, sms=sms)

    def nvmlDeviceGetAttributes(self, device: Any) -> Any:
        return SimpleNamespace(multiprocessorCount=device.sms)

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: Board) -> int:
        if handle.pcie is None:
            raise NVMLError("Not Supported")
        return handle.pcie[0]

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: Board) -> int:
        if handle.pcie is None:
            raise NVMLError("Not Supported")
        return handle.pcie[1]

    def nvmlDeviceGetNvLinkState(self, device: Board, link: int) -> int:
        if link >= 18:
            raise NVMLError("Invalid Argument")
        return int(link < device.nvlinks)

    def nvmlDeviceGetNvLinkVersion(self, device: Board, link: int) -> int:
        assert link < device.nvlinks
        return 4

    def nvmlDeviceGetP2PStatus(self, device1: Board, device2: Board, p2pIndex: int) -> int:
        if device1 is device2:
            raise NVMLError("Invalid Argument")
        able = device1.over_nvlink if p2pIndex == 2 else device1.reads
        assert p2pIndex in (0, 2)
        return self.NVML_P2P_STATUS_OK if device2.uuid in able else 5

    def _need(self) -> None:
        if not self.started:
            raise NVMLError("Uninitialized")
