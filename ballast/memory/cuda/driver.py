"""Implement the `Driver` protocol by `cuda-bindings` (extra `cuda`): all CUDA driver calls.

The only module that calls the CUDA driver; others use the protocol in `calls`.
"""

from __future__ import annotations

import importlib
import re
import threading
from typing import Any, NoReturn

from ballast.core.errors import DeviceError, DeviceLost, OutOfMemory, install_extra
from ballast.memory.cuda.calls import Attribute, WhenLost

LEAST_BINDINGS = (12, 9, 1)
"""The first cuda-bindings that release the GIL around every call: with older ones, a thread that
waits for the GPU stops all others."""
STICKY = frozenset({214, 220, 226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911})
"""Errors (CUresult) after which the process has to be replaced: those that by CUDA's documentation
any further work returns again, a device-side assertion (710), and uncorrectable errors of memory
(214) and NVLink (220), after which nothing that was computed can be trusted."""
_OUT_OF_MEMORY = 2
_INVALID_VALUE = 1
_NOT_READY = 600
_GROUP = 8
"""Multiprocessors."""
_PORTABLE, _MAPPED, _READ_ONLY = 0x01, 0x02, 0x08
"""Flags of cuMemHostRegister. With unified addressing memory is portable and mapped without the
first two as well."""


class CudaDriver:
    """Implements `Driver`."""

    def __init__(self, api: Any = None) -> None:
        """`api`: what takes the place of `cuda.bindings.driver`.

        Raises DeviceError without that package, without a driver, or where it does not start.
        """
        self._api = _bindings() if api is None else api
        self._splits: list[list[Any]] = []
        self.lost: DeviceLost | None = None
        self._when_lost: list[WhenLost] = []
        self._losing = threading.Lock()
        """Held while `lost` is set, and while `_when_lost` changes."""
        self._call("cuInit", 0)

    def lose(self, error: DeviceLost) -> None:
        with self._losing:
            if self.lost is not None:
                return
            self.lost, calls = error, self._when_lost
        for call in calls:
            call(error)

    def when_lost(self, call: WhenLost) -> None:
        with self._losing:
            if self.lost is None:
                self._when_lost = [*self._when_lost, call]
                return
        call(self.lost)

    def version(self) -> tuple[int, int]:
        number = self._int("cuDriverGetVersion")
        return number // 1000, number % 1000 // 10

    def count(self) -> int:
        return self._int("cuDeviceGetCount")

    def device(self, ordinal: int) -> int:
        return self._int("cuDeviceGet", ordinal)

    def attribute(self, device: int, which: Attribute) -> int:
        kind = getattr(self._api.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{which.value}")
        return self._int("cuDeviceGetAttribute", kind, device)

    def uuid(self, device: int) -> str:
        # Bindings of CUDA 12 have two; the first of them does not know MIG slices.
        newer = "cuDeviceGetUuid_v2"
        name = newer if hasattr(self._api, newer) else "cuDeviceGetUuid"
        found = bytes(self._call(name, device).bytes).hex()
        return "-".join((found[:8], found[8:12], found[12:16], found[16:20], found[20:]))

    def can_access(self, device: int, peer: int) -> bool:
        return bool(self._int("cuDeviceCanAccessPeer", device, peer))

    def retain_context(self, device: int) -> int:
        return self._int("cuDevicePrimaryCtxRetain", device)

    def release_context(self, device: int) -> None:
        self._call("cuDevicePrimaryCtxRelease", device)

    def set_current(self, context: int) -> None:
        self._call("cuCtxSetCurrent", context)

    def free_and_total(self) -> tuple[int, int]:
        free, total = self._call("cuMemGetInfo")
        return int(free), int(total)

    def granularity(self, device: int) -> int:
        least = self._api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return self._int("cuMemGetAllocationGranularity", self._properties(device), least)

    def reserve(self, n_bytes: int, alignment: int) -> int:
        return self._int("cuMemAddressReserve", n_bytes, alignment, 0, 0)

    def free(self, address: int, n_bytes: int) -> None:
        self._call("cuMemAddressFree", address, n_bytes)

    def create(self, device: int, n_bytes: int) -> int:
        return self._int("cuMemCreate", n_bytes, self._properties(device), 0)

    def release(self, handle: int) -> None:
        self._call("cuMemRelease", handle)

    def map(self, address: int, n_bytes: int, handle: int) -> None:
        self._call("cuMemMap", address, n_bytes, 0, handle, 0)

    def unmap(self, address: int, n_bytes: int) -> None:
        self._call("cuMemUnmap", address, n_bytes)

    def set_access(self, address: int, n_bytes: int, device: int) -> None:
        access = self._api.CUmemAccessDesc()
        access.location = self._location(device)
        access.flags = self._api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._call("cuMemSetAccess", address, n_bytes, [access], 1)

    def retain_handle(self, address: int) -> int | None:
        status, handle = self._try("cuMemRetainAllocationHandle", address)
        if int(status) == _INVALID_VALUE:
            return None
        self._check("cuMemRetainAllocationHandle", status)
        return int(handle)

    def handle_device(self, handle: int) -> int:
        return int(self._call("cuMemGetAllocationPropertiesFromHandle", handle).location.id)

    def export_fd(self, handle: int) -> int:
        return self._int("cuMemExportToShareableHandle", handle, self._fd_kind(), 0)

    def import_fd(self, fd: int) -> int:
        return self._int("cuMemImportFromShareableHandle", fd, self._fd_kind())

    def new_stream(self, priority: int = 0) -> int:
        apart = int(self._api.CUstream_flags.CU_STREAM_NON_BLOCKING)
        return self._int("cuStreamCreateWithPriority", apart, priority)

    def priorities(self) -> tuple[int, int]:
        least, greatest = self._call("cuCtxGetStreamPriorityRange")
        return int(least), int(greatest)

    def destroy_stream(self, stream: int) -> None:
        self._call("cuStreamDestroy", stream)

    def split(self, device: int, groups: int) -> int:
        kind = self._api.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        whole = self._call("cuDeviceGetDevResource", device, kind)
        # Bindings of CUDA 12 do not have the two sizes; 8 is what Hopper and later need.
        step = int(getattr(whole.sm, "smCoscheduledAlignment", 0)) or _GROUP
        least = int(getattr(whole.sm, "minSmPartitionSize", 0)) or step
        count = int(whole.sm.smCount)
        each = count // groups // step * step
        call = "cuDevSmResourceSplitByCount"
        if each < least:
            raise DeviceError(call, f"{count} multiprocessors are too few for {groups} groups")
        found, n, _ = self._call(call, groups, whole, 0, each)
        if n < groups:
            raise DeviceError(call, f"{n} groups of {each} multiprocessors where {groups} fit")
        self._splits.append(list(found))
        return len(self._splits) - 1

    def green_context(self, device: int, split: int, first: int, n: int) -> int:
        groups = self._splits[split][first : first + n]
        made_of = self._call("cuDevResourceGenerateDesc", groups, n)
        flag = int(self._api.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM)
        return self._int("cuGreenCtxCreate", made_of, device, flag)

    def destroy_green(self, context: int) -> None:
        self._call("cuGreenCtxDestroy", context)

    def green_stream(self, context: int) -> int:
        apart = int(self._api.CUstream_flags.CU_STREAM_NON_BLOCKING)
        return self._int("cuGreenCtxStreamCreate", context, apart, 0)

    def finish(self, stream: int) -> None:
        self._call("cuStreamSynchronize", stream)

    def wait_for(self, stream: int, event: int) -> None:
        self._call("cuStreamWaitEvent", stream, event, 0)

    def new_event(self, timed: bool = False) -> int:
        flags = self._api.CUevent_flags
        kind = int(flags.CU_EVENT_BLOCKING_SYNC)
        if not timed:
            kind |= int(flags.CU_EVENT_DISABLE_TIMING)
        return self._int("cuEventCreate", kind)

    def destroy_event(self, event: int) -> None:
        self._call("cuEventDestroy", event)

    def record(self, event: int, stream: int) -> None:
        self._call("cuEventRecord", event, stream)

    def is_done(self, event: int) -> bool:
        status, _ = self._try("cuEventQuery", event)
        if int(status) == _NOT_READY:
            return False
        self._check("cuEventQuery", status)
        return True

    def wait(self, event: int) -> None:
        self._call("cuEventSynchronize", event)

    def elapsed(self, start: int, end: int) -> float:
        return float(self._call("cuEventElapsedTime", start, end)) / 1000.0

    def copy_to_device(self, target: int, source: int, n_bytes: int, stream: int) -> None:
        self._call("cuMemcpyHtoDAsync", target, source, n_bytes, stream)

    def copy_to_host(self, target: int, source: int, n_bytes: int, stream: int) -> None:
        self._call("cuMemcpyDtoHAsync", target, source, n_bytes, stream)

    def copy_within(self, target: int, source: int, n_bytes: int, stream: int) -> None:
        self._call("cuMemcpyDtoDAsync", target, source, n_bytes, stream)

    def pin(self, address: int, n_bytes: int, read_only: bool) -> None:
        flags = _PORTABLE | _MAPPED | (_READ_ONLY if read_only else 0)
        self._call("cuMemHostRegister", address, n_bytes, flags)

    def device_pointer(self, address: int) -> int:
        return self._int("cuMemHostGetDevicePointer", address, 0)

    def unpin(self, address: int) -> None:
        self._call("cuMemHostUnregister", address)

    def _location(self, device: int) -> Any:
        location = self._api.CUmemLocation()
        location.type = self._api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = device
        return location

    def _properties(self, device: int) -> Any:
        properties = self._api.CUmemAllocationProp()
        properties.type = self._api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.requestedHandleTypes = self._fd_kind()
        properties.location = self._location(device)
        return properties

    def _fd_kind(self) -> Any:
        kinds = self._api.CUmemAllocationHandleType
        return kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def _int(self, name: str, *arguments: object) -> int:
        return int(self._call(name, *arguments))

    def _call(self, name: str, *arguments: object) -> Any:
        status, value = self._try(name, *arguments)
        self._check(name, status)
        return value

    def _try(self, name: str, *arguments: object) -> tuple[Any, Any]:
        """The status, and what the call returns: one value, several, or None."""
        try:
            status, *values = getattr(self._api, name)(*arguments)
        except RuntimeError as error:
            # How the bindings say that there is no driver, or that it is too old for a call.
            raise DeviceError(name, str(error)) from error
        except (KeyError, ValueError) as error:
            # Raised for an error of the driver that is not in their enumeration: KeyError by
            # bindings of 12.9, ValueError by later ones.
            code = re.match(r"\d+", str(error))
            if code is None:
                raise
            reason = f"error {code[0]}, which this cuda-bindings does not know; update it"
            self._fail(name, int(code[0]), reason, error)
        return status, values[0] if len(values) == 1 else tuple(values) or None

    def _check(self, name: str, status: Any) -> None:
        if int(status) == 0:
            return
        found, text = self._try("cuGetErrorString", status)
        known = str(getattr(status, "name", status))
        reason = f"{known}: {text.decode()}" if int(found) == 0 and text else known
        self._fail(name, int(status), reason)

    def _fail(
        self, name: str, code: int, reason: str, cause: BaseException | None = None
    ) -> NoReturn:
        if code == _OUT_OF_MEMORY:
            raise OutOfMemory(name, reason) from cause
        if code in STICKY:
            lost = DeviceLost(name, reason)
            self.lose(lost)
            raise lost from cause
        raise DeviceError(name, reason) from cause


def _bindings() -> Any:
    call, cure = "import cuda.bindings", install_extra("cuda")
    try:
        version = str(importlib.import_module("cuda.bindings").__version__)
        api = importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise DeviceError(call, f"{error}; {cure}") from error
    if tuple(int(n) for n in re.findall(r"\d+", version)[:3]) < LEAST_BINDINGS:
        least = ".".join(map(str, LEAST_BINDINGS))
        raise DeviceError(call, f"{version} holds the GIL while it waits: {least} or newer; {cure}")
    return api
