"""Define the protocol of CUDA driver calls that Ballast makes; `driver` implements it.

All GPU code calls the driver through this protocol, so that tests can pass a stand-in.

Devices, contexts, streams, events and handles are the driver's own numbers; addresses are the
device's unless noted; sizes are bytes. A failing call raises DeviceError with the call's name and
the driver's error; lack of memory raises OutOfMemory, and an error after which the process cannot
use the GPU any more raises DeviceLost. Calls marked *current* need a context that is current
in the calling thread. All release the GIL.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Protocol

from ballast.core.errors import DeviceLost

WhenLost = Callable[[DeviceLost], object]


class Attribute(StrEnum):
    """Attributes of a device: `CU_DEVICE_ATTRIBUTE_...`."""

    MAPS_MEMORY = "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"
    EXPORTS_FDS = "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED"
    PINS_READ_ONLY = "READ_ONLY_HOST_REGISTER_SUPPORTED"
    MULTIPROCESSORS = "MULTIPROCESSOR_COUNT"


class Driver(Protocol):
    """CUDA driver calls, one object for each process and device."""

    @property
    def lost(self) -> DeviceLost | None:
        """The error since which the process cannot use the GPU, if there was one."""

    def lose(self, error: DeviceLost) -> None:
        """Declare the GPU lost. The first call counts; from any thread."""

    def when_lost(self, call: WhenLost) -> None:
        """Have `call` called once with the error when the GPU is lost, by the thread that finds it,
        before that thread's own call raises; at once if it is lost already. `call` must not block
        and must not call the driver."""

    def version(self) -> tuple[int, int]:
        """Version of CUDA that the driver supports, as (13, 0)."""

    def count(self) -> int:
        """Devices that this process may use."""

    def device(self, ordinal: int) -> int: ...

    def attribute(self, device: int, which: Attribute) -> int: ...

    def uuid(self, device: int) -> str:
        """Return a device's UUID as NVML writes it, without the prefix (`GPU-`, `MIG-`)."""

    def can_access(self, device: int, peer: int) -> bool:
        """Whether `device` can use memory of `peer` in place."""

    def retain_context(self, device: int) -> int:
        """Retain and return the primary context, which PyTorch uses too. Release as often."""

    def release_context(self, device: int) -> None: ...

    def set_current(self, context: int) -> None:
        """Make a context current in the calling thread."""

    def free_and_total(self) -> tuple[int, int]:
        """Return (free, total) bytes of the device, over all processes. *Current*."""

    def granularity(self, device: int) -> int:
        """Smallest size and alignment of memory that is created and mapped."""

    def reserve(self, n_bytes: int, alignment: int) -> int:
        """Reserve addresses that are not backed; return the first."""

    def free(self, address: int, n_bytes: int) -> None:
        """Free reserved addresses: exactly one reservation, with nothing mapped in it."""

    def create(self, device: int, n_bytes: int) -> int:
        """Create exportable memory and return its handle. Raises OutOfMemory."""

    def release(self, handle: int) -> None:
        """Release a handle. Its memory is freed when it has neither mappings nor handles left, in
        any process."""

    def map(self, address: int, n_bytes: int, handle: int) -> None:
        """Map all memory of a handle. It must not be touched before `set_access`. *Current*."""

    def unmap(self, address: int, n_bytes: int) -> None:
        """Unmap adjacent whole mappings, which nothing in flight may use. Some drivers may raise
        DeviceError for several mappings in one call, and leave all of them. *Current*."""

    def set_access(self, address: int, n_bytes: int, device: int) -> None:
        """Allow `device` to read and write adjacent mappings, any number. *Current*."""

    def retain_handle(self, address: int) -> int | None:
        """Return the handle mapped at `address`, which the caller must release; None: nothing is
        mapped there."""

    def handle_device(self, handle: int) -> int:
        """Return the device whose memory a handle is."""

    def export_fd(self, handle: int) -> int:
        """Export a handle as a file descriptor for another process; the caller closes it."""

    def import_fd(self, fd: int) -> int:
        """Import exported memory and return a handle, which the caller must release. The descriptor
        stays open."""

    def new_stream(self, priority: int = 0) -> int:
        """Create a stream without implicit waits for others; lower `priority` numbers run first.
        *Current*."""

    def priorities(self) -> tuple[int, int]:
        """Return the least and the greatest priority; the greatest is negative. *Current*."""

    def destroy_stream(self, stream: int) -> None: ...

    def split(self, device: int, groups: int) -> int:
        """Split the multiprocessors into `groups` disjoint groups of equal size, without the
        remainder. Returns the number of the split, which stays valid. Raises DeviceError if there
        are too few."""

    def green_context(self, device: int, split: int, first: int, n: int) -> int:
        """Create a context that runs on `n` groups of a split from `first` only. It shares memory
        and modules with the primary context, which it keeps retained."""

    def destroy_green(self, context: int) -> None:
        """Destroy a green context, after all its streams."""

    def green_stream(self, context: int) -> int:
        """Create a stream like `new_stream`, whose work runs in a green context."""

    def finish(self, stream: int) -> None:
        """Block until all work of the stream has ended."""

    def wait_for(self, stream: int, event: int) -> None:
        """Make later work of the stream wait for an event's last `record`. Returns at once."""

    def new_event(self, timed: bool = False) -> int:
        """Create an event, at which a waiting thread sleeps; `timed`: for `elapsed`. *Current*."""

    def destroy_event(self, event: int) -> None: ...

    def record(self, event: int, stream: int) -> None:
        """Record an event after all work that the stream has so far."""

    def is_done(self, event: int) -> bool:
        """Whether the work before the last `record` has ended. An error of that work is raised."""

    def wait(self, event: int) -> None:
        """Block until an event is done. An error of that work is raised."""

    def elapsed(self, start: int, end: int) -> float:
        """Return the seconds between two timed events, which must be done; exact to about half a
        microsecond."""

    def copy_to_device(self, target: int, source: int, n_bytes: int, stream: int) -> None:
        """Copy from a host address, in stream order. *Current*."""

    def copy_to_host(self, target: int, source: int, n_bytes: int, stream: int) -> None:
        """Copy to a host address, in stream order. *Current*."""

    def copy_within(self, target: int, source: int, n_bytes: int, stream: int) -> None:
        """Copy within the device, in stream order. *Current*."""

    def pin(self, address: int, n_bytes: int, read_only: bool) -> None:
        """Page-lock memory of the host that is mapped already, and map it into the device's
        addresses, for all contexts. *Current*."""

    def device_pointer(self, address: int) -> int:
        """Return where kernels find page-locked memory of the host, given where it was pinned.
        Raises DeviceError where it is not pinned, or not mapped. *Current*."""

    def unpin(self, address: int) -> None:
        """Undo `pin`."""
