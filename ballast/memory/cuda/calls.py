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
    """The driver, once for each process and device."""

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
        """As NVML writes it, without its prefix (`GPU-`, `MIG-`)."""

    def can_access(self, device: int, peer: int) -> bool:
        """Whether `device` can use memory of `peer` in place."""

    def retain_context(self, device: int) -> int:
        """The primary context, which PyTorch uses, too. To be released as often as retained."""

    def release_context(self, device: int) -> None: ...

    def set_current(self, context: int) -> None:
        """Current in the calling thread from now on."""

    def free_and_total(self) -> tuple[int, int]:
        """Bytes of the device, whoever has the rest. *Current*."""

    def granularity(self, device: int) -> int:
        """Smallest size and alignment of memory that is created and mapped."""

    def reserve(self, n_bytes: int, alignment: int) -> int:
        """Addresses, backed by nothing."""

    def free(self, address: int, n_bytes: int) -> None:
        """Exactly what was reserved, with nothing mapped in it."""

    def create(self, device: int, n_bytes: int) -> int:
        """A handle to memory that can be exported. Raises OutOfMemory."""

    def release(self, handle: int) -> None:
        """The memory goes when nothing maps it, here or elsewhere, and no handle is left."""

    def map(self, address: int, n_bytes: int, handle: int) -> None:
        """All memory of a handle. Not to be touched before `set_access`. *Current*."""

    def unmap(self, address: int, n_bytes: int) -> None:
        """Take away whole mappings, one after the other; nothing in flight may use them. Of several
        in one call some drivers may raise DeviceError, with all of them left. *Current*."""

    def set_access(self, address: int, n_bytes: int, device: int) -> None:
        """`device` may read and write there: any number of adjacent mappings. *Current*."""

    def retain_handle(self, address: int) -> int | None:
        """The handle mapped at `address`, to be released once more; None: nothing is."""

    def handle_device(self, handle: int) -> int:
        """Whose memory it is."""

    def export_fd(self, handle: int) -> int:
        """A file descriptor of the caller's, for another process."""

    def import_fd(self, fd: int) -> int:
        """A handle to what was exported, to be released; the descriptor stays the caller's."""

    def new_stream(self, priority: int = 0) -> int:
        """One that waits for no other; lower numbers go first. *Current*."""

    def priorities(self) -> tuple[int, int]:
        """The least and the greatest priority of a stream; the greatest is negative. *Current*."""

    def destroy_stream(self, stream: int) -> None: ...

    def split(self, device: int, groups: int) -> int:
        """So many disjoint groups of equally many multiprocessors; what is over is in none. The
        number of the split, which stays. Raises DeviceError where there are too few."""

    def green_context(self, device: int, split: int, first: int, n: int) -> int:
        """A context that runs on groups `first .. first + n` of a split, and nowhere else; it
        shares memory and modules with the primary one, which is retained meanwhile."""

    def destroy_green(self, context: int) -> None:
        """After all its streams."""

    def green_stream(self, context: int) -> int:
        """A stream as `new_stream` makes them, whose work runs in that context."""

    def finish(self, stream: int) -> None:
        """Return when all work of the stream has ended."""

    def wait_for(self, stream: int, event: int) -> None:
        """Have later work of the stream begin after what was recorded. Returns at once."""

    def new_event(self, timed: bool = False) -> int:
        """Create an event, at which a waiting thread sleeps; `timed`: for `elapsed`. *Current*."""

    def destroy_event(self, event: int) -> None: ...

    def record(self, event: int, stream: int) -> None:
        """After all work that the stream has so far."""

    def is_done(self, event: int) -> bool:
        """Whether the work before the last `record` has ended. An error of that work is raised."""

    def wait(self, event: int) -> None:
        """Return when it is done. An error of that work is raised."""

    def elapsed(self, start: int, end: int) -> float:
        """Seconds from when one timed event was reached to when another was; both are done. To
        about half a microsecond."""

    def copy_to_device(self, target: int, source: int, n_bytes: int, stream: int) -> None:
        """From an address of the host; in the order of the stream. *Current*."""

    def copy_to_host(self, target: int, source: int, n_bytes: int, stream: int) -> None:
        """To an address of the host; in the order of the stream. *Current*."""

    def copy_within(self, target: int, source: int, n_bytes: int, stream: int) -> None:
        """From one place of the device to another; in the order of the stream. *Current*."""

    def pin(self, address: int, n_bytes: int, read_only: bool) -> None:
        """Page-lock memory of the host that is mapped already, for all contexts. *Current*."""

    def unpin(self, address: int) -> None:
        """Undo `pin`."""
