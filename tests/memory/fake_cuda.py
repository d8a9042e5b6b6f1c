"""A CUDA driver of host memory that checks every argument, order and double use.

Handles are memfds, mappings are `mmap`: what is reserved and not mapped, or mapped and not made
accessible, cannot be touched, contents follow the page, and descriptors go to other processes.
Whoever imports one holds a lock on it, so that any process can tell what others have imported.
Work on streams happens when somebody waits for it, or when a test says so (`run`), as late as a GPU
may do it; it takes what its author says on a clock of its own, which events read. What no correct
program does is a `Misuse`, which nothing that is tested catches; what a driver may answer to a
correct one is a DeviceError, and `fail` asks for one.
"""

from __future__ import annotations

import ctypes
import fcntl
import inspect
import itertools
import math
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ballast.core.errors import DeviceError, DeviceLost, OutOfMemory
from ballast.memory import syscalls as sys
from ballast.memory.cuda.calls import Attribute, WhenLost

_MEMFD = "fake-cuda:"
"""And the device that has the memory: the real driver knows that of what it imports."""
_NEEDS_CONTEXT = {
    *("free_and_total", "map", "unmap", "set_access", "new_stream", "priorities", "new_event"),
    *(
        "copy_to_device",
        "copy_to_host",
        "copy_within",
        "pin",
        "device_pointer",
        "finish",
        "wait_for",
        "record",
        "is_done",
        "wait",
    ),
}


class Misuse(AssertionError):
    """A call that a driver need not survive."""


@dataclass
class Handle:
    fd: int
    n_bytes: int
    references: int = 1
    mapped: int = 0


@dataclass
class Mapping:
    n_bytes: int
    handle: int
    accessible: bool = False


@dataclass
class Work:
    """One item of a stream."""

    do: Callable[[], object]
    touches: list[tuple[int, int]]
    """(address, bytes) on the device or the host."""
    waits_for: tuple[int, int] | None = None
    """(event, number of its record)."""
    seconds: float = 0.0
    launched: float = 0.0


@dataclass
class Event:
    recorded: int = 0
    stream: int | None = None
    timed: bool = False
    reached: list[float] = field(default_factory=list)
    """When, each time."""

    @property
    def done(self) -> int:
        return len(self.reached)


@dataclass
class _Failure:
    calls: tuple[str, ...]
    after: int
    error: DeviceError


def _checked(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def checked(self: FakeDriver, *args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(call).bind(self, *args, **kwargs).arguments
        for which, value in bound.items():
            if which != "self" and not isinstance(value, int | Attribute):
                raise Misuse(f"{name}: {which} is {value!r}")
        with self.lock:
            if name in _NEEDS_CONTEXT and self.current() is None:
                raise Misuse(f"{name}: no context is current in this thread")
            self.calls.append(name)
            self._fail_if_asked(name)
            if self.broken is not None:
                raise self.broken
            return call(self, *args, **kwargs)

    return checked


class FakeDriver:
    """Implements `Driver`; `devices` of them, each with `n_bytes` of memory."""

    def __init__(
        self,
        n_bytes: int = 1 << 26,
        devices: int = 1,
        granularity: int = 64 << 10,
        peers: bool = True,
        attributes: dict[Attribute, int] | None = None,
        groups: int = 8,
        bandwidth: float = math.inf,
        exclusive: bool = False,
        stretches: bool = True,
    ) -> None:
        """`bandwidth`: of each copy, in bytes a second. `stretches`: one call unmaps several
        mappings. `exclusive`: memory that others have
        imported is neither exported again, mapped, nor released here. To the driver that is no
        fault; to who lends pages it is."""
        self.n_bytes, self.n_devices, self.grain, self.peers = n_bytes, devices, granularity, peers
        self.attributes = dict.fromkeys(Attribute, 1) | (attributes or {})
        self.exclusive, self.stretches = exclusive, stretches
        self.lock = threading.RLock()
        self.calls: list[str] = []
        self.bandwidth = bandwidth
        self.now = 0.0
        """When the host last saw something reached: what is launched later runs later."""
        self.times: dict[int, float] = {}
        """When each stream has done what it has done."""
        self.used = [0] * devices
        self.contexts: dict[int, int] = {}
        """Device -> times retained; the context of device `d` is number `d + 100`."""
        self.reserved: dict[int, int] = {}
        self.mappings: dict[int, Mapping] = {}
        self.handles: dict[int, Handle] = {}
        self.streams: dict[int, list[Work]] = {}
        self.events: dict[int, Event] = {}
        self.pinned: dict[int, tuple[int, bool]] = {}
        self.device_pointers: dict[int, int] = {}
        """Where kernels find pinned memory: mapped a second time, for as long as it is pinned."""
        self.groups = groups
        """Most that the multiprocessors can be split into."""
        self.splits: dict[int, tuple[int, int]] = {}
        """Device and groups of each."""
        self.greens: dict[int, tuple[int, int, int]] = {}
        """Split, first group and groups of each context."""
        self.green_streams: dict[int, int] = {}
        """Stream -> green context."""
        self._mine: dict[tuple[int, int], int] = {}
        """Memory made here: memfd -> device."""
        self._current = threading.local()
        self._numbers = itertools.count(1000)
        self._failures: list[_Failure] = []
        self.broken: DeviceLost | None = None
        """What every call raises since one has raised it."""
        self.lost: DeviceLost | None = None
        self._when_lost: list[WhenLost] = []

    def fail(self, *calls: str, after: int = 0, error: DeviceError | None = None) -> None:
        """Have the call of those names (any, if none is given) that comes after `after` others
        fail; with a DeviceLost, all calls from then on."""
        result = error or DeviceError("/".join(calls), "CUDA_ERROR_UNKNOWN: asked for")
        self._failures.append(_Failure(calls, after, result))

    def launch(
        self, stream: int, address: int, n_bytes: int, value: int, seconds: float = 0.0
    ) -> None:
        """A kernel that fills memory, once the stream gets to it."""

        def fill() -> None:
            ctypes.memset(address, value, n_bytes)

        self.put(stream, fill, [(address, n_bytes)], seconds=seconds)

    def put(
        self,
        stream: int,
        do: Callable[[], object],
        touches: list[tuple[int, int]],
        waits_for: tuple[int, int] | None = None,
        seconds: float = 0.0,
    ) -> None:
        """Work of any kind."""
        self._known_stream(stream)
        self.streams[stream].append(Work(do, touches, waits_for, seconds, self.now))

    def run(self, stream: int, most: int | None = None) -> int:
        """Do up to `most` items of a stream, and whatever they wait for; how many were done."""
        with self.lock:
            n = 0
            while self.streams[stream] and (most is None or n < most):
                self._do_next(stream)
                n += 1
            return n

    def elsewhere(self) -> int:
        """Memory made here that others have imported, in handles."""
        with self.lock:
            mine = (known for known in self.handles.values() if self._file(known.fd) in self._mine)
            return sum(map(self._is_elsewhere, mine))

    def is_clean(self) -> bool:
        """Nothing is left of whoever used it."""
        left = (
            self.greens,
            self.reserved,
            self.mappings,
            self.handles,
            self.streams,
            self.events,
            self.pinned,
        )
        return not any((*left, *self.used, *self.contexts.values()))

    def lose(self, error: DeviceLost) -> None:
        if self.lost is None:
            self.lost = error
            for call in self._when_lost:
                call(error)

    def when_lost(self, call: WhenLost) -> None:
        self._when_lost.append(call)
        if self.lost is not None:
            call(self.lost)

    def version(self) -> tuple[int, int]:
        return 13, 0

    def count(self) -> int:
        return self.n_devices

    def device(self, ordinal: int) -> int:
        if not 0 <= ordinal < self.n_devices:
            raise DeviceError("cuDeviceGet", "CUDA_ERROR_INVALID_DEVICE: invalid device ordinal")
        return ordinal

    def attribute(self, device: int, which: Attribute) -> int:
        self._known_device(device)
        return self.attributes[which]

    def uuid(self, device: int) -> str:
        self._known_device(device)
        return f"00000000-0000-0000-0000-{device:012x}"

    def can_access(self, device: int, peer: int) -> bool:
        self._known_device(device)
        self._known_device(peer)
        if device == peer:
            raise Misuse("a device is no peer of itself")
        return self.peers

    def retain_context(self, device: int) -> int:
        self._known_device(device)
        self.contexts[device] = self.contexts.get(device, 0) + 1
        return device + 100

    def release_context(self, device: int) -> None:
        if not self.contexts.get(device):
            raise Misuse(f"released the context of {device}, which is not retained")
        self.contexts[device] -= 1

    def set_current(self, context: int) -> None:
        if not self.contexts.get(context - 100):
            raise Misuse(f"context {context} is not retained")
        self._current.context = context

    def free_and_total(self) -> tuple[int, int]:
        device = (self.current() or 0) - 100
        return self.n_bytes - self.used[device], self.n_bytes

    def granularity(self, device: int) -> int:
        self._known_device(device)
        return self.grain

    def reserve(self, n_bytes: int, alignment: int) -> int:
        self._grained("reserve", n_bytes)
        if alignment & (alignment - 1):
            raise Misuse(f"alignment {alignment} is no power of two")
        alignment = max(alignment, self.grain)
        flags = sys.MAP_PRIVATE | sys.MAP_ANONYMOUS | sys.MAP_NORESERVE
        found = sys.mmap(0, n_bytes + alignment, sys.PROT_NONE, flags)
        base = -(-found // alignment) * alignment
        if base > found:
            sys.munmap(found, base - found)
        if tail := found + alignment - base:
            sys.munmap(base + n_bytes, tail)
        self.reserved[base] = n_bytes
        return base

    def free(self, address: int, n_bytes: int) -> None:
        if self.reserved.get(address) != n_bytes:
            raise Misuse(f"freed {n_bytes} bytes at {address:#x}: not what was reserved")
        if any(address <= at < address + n_bytes for at in self.mappings):
            raise Misuse(f"freed {address:#x} with something mapped")
        sys.munmap(address, n_bytes)
        del self.reserved[address]

    def create(self, device: int, n_bytes: int) -> int:
        self._known_device(device)
        self._grained("create", n_bytes)
        if self.used[device] + n_bytes > self.n_bytes:
            raise OutOfMemory("cuMemCreate", "CUDA_ERROR_OUT_OF_MEMORY: out of memory")
        fd = os.memfd_create(f"{_MEMFD}{device}", os.MFD_CLOEXEC)
        os.ftruncate(fd, n_bytes)
        self.used[device] += n_bytes
        self._mine[self._file(fd)] = device
        return self._new_handle(fd, n_bytes)

    def release(self, handle: int) -> None:
        known = self._known_handle(handle, "released")
        if known.references == 1 and not known.mapped:
            self._not_elsewhere(known, "released")
        known.references -= 1
        self._drop_if_unused(handle)

    def map(self, address: int, n_bytes: int, handle: int) -> None:
        known = self._known_handle(handle, "mapped")
        self._grained("map", n_bytes, address)
        if n_bytes != known.n_bytes:
            raise Misuse(f"mapped {n_bytes} bytes of a handle of {known.n_bytes}")
        end = address + n_bytes
        if not any(at <= address and end <= at + size for at, size in self.reserved.items()):
            raise Misuse(f"mapped at {address:#x}, which is not reserved")
        if any(at < end and address < at + m.n_bytes for at, m in self.mappings.items()):
            raise Misuse(f"mapped at {address:#x}, where something is mapped")
        self._not_elsewhere(known, "mapped")
        flags = sys.MAP_SHARED | sys.MAP_FIXED
        sys.mmap(address, n_bytes, sys.PROT_NONE, flags, known.fd)
        self.mappings[address] = Mapping(n_bytes, handle)
        known.mapped += 1

    def unmap(self, address: int, n_bytes: int) -> None:
        found = self._mapped(address, n_bytes)
        if len(found) > 1 and not self.stretches:
            raise DeviceError("cuMemUnmap", "CUDA_ERROR_INVALID_VALUE: invalid argument")
        for stream, queue in self.streams.items():
            for work in queue:
                if any(at < address + n_bytes and address < at + n for at, n in work.touches):
                    raise Misuse(f"unmapped {address:#x}, which work on stream {stream} uses")
        flags = sys.MAP_PRIVATE | sys.MAP_ANONYMOUS | sys.MAP_NORESERVE | sys.MAP_FIXED
        sys.mmap(address, n_bytes, sys.PROT_NONE, flags)
        for at, mapping in found:
            del self.mappings[at]
            self.handles[mapping.handle].mapped -= 1
            self._drop_if_unused(mapping.handle)

    def set_access(self, address: int, n_bytes: int, device: int) -> None:
        self._known_device(device)
        self._grained("set_access", n_bytes, address)
        for at, mapping in self._mapped(address, n_bytes):
            owner = self._made_on(self.handles[mapping.handle].fd)
            if owner != device and not self.peers:
                raise Misuse(f"device {device} cannot access memory of {owner}")
            flags = sys.MAP_SHARED | sys.MAP_FIXED
            prot = sys.PROT_READ | sys.PROT_WRITE
            sys.mmap(at, mapping.n_bytes, prot, flags, self.handles[mapping.handle].fd)
            mapping.accessible = True

    def retain_handle(self, address: int) -> int | None:
        for at, mapping in self.mappings.items():
            if at <= address < at + mapping.n_bytes:
                self.handles[mapping.handle].references += 1
                return mapping.handle
        return None

    def handle_device(self, handle: int) -> int:
        return self._made_on(self._known_handle(handle, "asked of").fd)

    def export_fd(self, handle: int) -> int:
        known = self._known_handle(handle, "exported")
        self._not_elsewhere(known, "exported")
        return os.dup(known.fd)

    def import_fd(self, fd: int) -> int:
        try:
            n_bytes = os.fstat(fd).st_size
        except OSError as error:
            raise Misuse(f"imported descriptor {fd}, which is not open") from error
        if not 0 <= self._made_on(fd) < self.n_devices:
            raise DeviceError(
                "cuMemImportFromShareableHandle", "CUDA_ERROR_INVALID_VALUE: invalid argument"
            )
        # Opened anew, as locks are of open files and not of descriptors.
        own = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        fcntl.flock(own, fcntl.LOCK_SH)
        return self._new_handle(own, n_bytes)

    def new_stream(self, priority: int = 0) -> int:
        least, greatest = -5, 0
        if not least <= priority <= greatest:
            raise Misuse(f"priority {priority}")
        stream = next(self._numbers)
        self.streams[stream] = []
        return stream

    def priorities(self) -> tuple[int, int]:
        return 0, -5

    def destroy_stream(self, stream: int) -> None:
        self._known_stream(stream)
        self.run(stream)
        self.green_streams.pop(stream, None)
        del self.streams[stream]

    def split(self, device: int, groups: int) -> int:
        self._known_device(device)
        if groups > self.groups:
            raise DeviceError("cuDevSmResourceSplitByCount", "too few multiprocessors")
        split = next(self._numbers)
        self.splits[split] = device, groups
        return split

    def green_context(self, device: int, split: int, first: int, n: int) -> int:
        on, groups = self.splits.get(split, (-1, 0))
        if on != device or first < 0 or n < 1 or first + n > groups:
            raise Misuse(f"groups {first} .. {first + n} of {groups} on {device}")
        context = next(self._numbers)
        self.greens[context] = split, first, n
        return context

    def destroy_green(self, context: int) -> None:
        if context not in self.greens or context in self.green_streams.values():
            raise Misuse(f"destroyed green context {context}, which is not there or has streams")
        del self.greens[context]

    def green_stream(self, context: int) -> int:
        if context not in self.greens:
            raise Misuse(f"green context {context} is not there")
        stream = next(self._numbers)
        self.streams[stream] = []
        self.green_streams[stream] = context
        return stream

    def finish(self, stream: int) -> None:
        self._known_stream(stream)
        self.run(stream)
        self.now = max(self.now, self.times.get(stream, 0.0))

    def wait_for(self, stream: int, event: int) -> None:
        known = self._recorded(event, "waited for")
        self.put(stream, lambda: None, [], (event, known.recorded))

    def new_event(self, timed: bool = False) -> int:
        event = next(self._numbers)
        self.events[event] = Event(timed=timed)
        return event

    def destroy_event(self, event: int) -> None:
        if event not in self.events:
            raise Misuse(f"destroyed event {event}, which is not there")
        del self.events[event]

    def record(self, event: int, stream: int) -> None:
        self._known_stream(stream)
        if event not in self.events:
            raise Misuse(f"recorded event {event}, which is not there")
        known = self.events[event]
        if known.done < known.recorded:
            raise Misuse(f"recorded event {event} before its last record was reached")
        known.recorded += 1
        known.stream = stream
        self.put(stream, lambda: known.reached.append(self.times[stream]), [])

    def is_done(self, event: int) -> bool:
        known = self._recorded(event, "asked for")
        return known.done == known.recorded

    def wait(self, event: int) -> None:
        known = self._recorded(event, "waited for")
        self._run_to(event, known.recorded)
        self.now = max(self.now, known.reached[-1])

    def elapsed(self, start: int, end: int) -> float:
        known = [self._recorded(event, "asked for its time") for event in (start, end)]
        for event in known:
            if not event.timed:
                raise Misuse("asked an event for its time that was made without")
            if event.done < event.recorded:
                raise Misuse("asked an event for its time before it was reached")
        return known[1].reached[-1] - known[0].reached[-1]

    def copy_to_device(self, target: int, source: int, n_bytes: int, stream: int) -> None:
        self._copy(target, source, n_bytes, stream, device_address=target)

    def copy_to_host(self, target: int, source: int, n_bytes: int, stream: int) -> None:
        self._copy(target, source, n_bytes, stream, device_address=source)

    def copy_within(self, target: int, source: int, n_bytes: int, stream: int) -> None:
        if not self._accessible(source, n_bytes):
            raise DeviceError("cuMemcpyDtoDAsync", "CUDA_ERROR_INVALID_VALUE: invalid argument")
        self._copy(target, source, n_bytes, stream, device_address=target)

    def pin(self, address: int, n_bytes: int, read_only: bool) -> None:
        if n_bytes <= 0 or address % sys.PAGESIZE or n_bytes % sys.PAGESIZE:
            raise Misuse(f"pinned {n_bytes} bytes at {address:#x}")
        if any(at < address + n_bytes and address < at + n for at, (n, _) in self.pinned.items()):
            raise DeviceError("cuMemHostRegister", "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED")
        self.pinned[address] = (n_bytes, read_only)

    def unpin(self, address: int) -> None:
        if address not in self.pinned:
            raise Misuse(f"unpinned {address:#x}, which is not pinned")
        at, (n_bytes, _) = address, self.pinned[address]
        for queue in self.streams.values():
            if any(at < a + n and a < at + n_bytes for w in queue for a, n in w.touches):
                raise Misuse(f"unpinned {address:#x}, which work in flight uses")
        del self.pinned[address]
        if (mapped := self.device_pointers.pop(address, None)) is not None:
            sys.munmap(mapped, n_bytes)

    def device_pointer(self, address: int) -> int:
        if address not in self.pinned:
            raise DeviceError(
                "cuMemHostGetDevicePointer", "CUDA_ERROR_INVALID_VALUE: invalid argument"
            )
        if address not in self.device_pointers:
            n_bytes, _ = self.pinned[address]
            flags = sys.MAP_PRIVATE | sys.MAP_ANONYMOUS | sys.MAP_NORESERVE
            mapped = sys.mmap(0, n_bytes, sys.PROT_NONE, flags)
            sys.map_again(address, mapped, n_bytes)
            self.device_pointers[address] = mapped
        return self.device_pointers[address]

    def current(self) -> int | None:
        return getattr(self._current, "context", None)

    def _copy(
        self, target: int, source: int, n_bytes: int, stream: int, device_address: int
    ) -> None:
        if n_bytes <= 0 or target <= 0 or source <= 0:
            raise DeviceError("cuMemcpyAsync", "CUDA_ERROR_INVALID_VALUE: invalid argument")
        if not self._accessible(device_address, n_bytes):
            raise DeviceError("cuMemcpyAsync", "CUDA_ERROR_INVALID_VALUE: invalid argument")
        for address in {target, source} - {device_address}:
            self._pinned_or_not(address, n_bytes)
        touches = [(target, n_bytes), (source, n_bytes)]
        seconds = n_bytes / self.bandwidth
        self.put(stream, lambda: ctypes.memmove(target, source, n_bytes), touches, None, seconds)

    def _pinned_or_not(self, address: int, n_bytes: int) -> None:
        end = address + n_bytes
        parts = ((max(a, address), min(a + n, end)) for a, (n, _) in self.pinned.items())
        pinned = sum(max(0, upto - at) for at, upto in parts)
        if pinned not in (0, n_bytes):
            raise DeviceError("cuMemcpyAsync", "CUDA_ERROR_INVALID_VALUE: pinned in part")

    def _accessible(self, address: int, n_bytes: int) -> bool:
        end = address + n_bytes
        while address < end:
            for at, mapping in self.mappings.items():
                if at <= address < at + mapping.n_bytes and mapping.accessible:
                    address = at + mapping.n_bytes
                    break
            else:
                return False
        return True

    def _do_next(self, stream: int) -> None:
        work = self.streams[stream][0]
        begin = self.times.get(stream, 0.0)
        if work.waits_for is not None:
            self._run_to(*work.waits_for)
            event, number = work.waits_for
            begin = max(begin, self.events[event].reached[number - 1])
        self.streams[stream].pop(0)
        self.times[stream] = max(begin, work.launched) + work.seconds
        work.do()

    def _run_to(self, event: int, number: int) -> None:
        known = self.events[event]
        while known.done < number:
            assert known.stream is not None
            self._do_next(known.stream)

    def _fail_if_asked(self, name: str) -> None:
        for failure in list(self._failures):
            if not failure.calls or name in failure.calls:
                if failure.after == 0:
                    self._failures.remove(failure)
                    if isinstance(failure.error, DeviceLost):
                        self.broken = failure.error
                        self.lose(failure.error)
                    raise failure.error
                failure.after -= 1

    def _new_handle(self, fd: int, n_bytes: int) -> int:
        handle = next(self._numbers)
        self.handles[handle] = Handle(fd, n_bytes)
        return handle

    def _drop_if_unused(self, handle: int) -> None:
        known = self.handles[handle]
        if known.references or known.mapped:
            return
        del self.handles[handle]
        file = self._file(known.fd)
        os.close(known.fd)
        still = any(self._file(other.fd) == file for other in self.handles.values())
        if not still and file in self._mine:
            self.used[self._mine.pop(file)] -= known.n_bytes

    def _mapped(self, address: int, n_bytes: int) -> list[tuple[int, Mapping]]:
        """Whole mappings, one after the other, that fill these bytes."""
        found: list[tuple[int, Mapping]] = []
        at = address
        while at < address + n_bytes:
            if at not in self.mappings:
                raise Misuse(f"no mapping begins at {at:#x}")
            found.append((at, self.mappings[at]))
            at += self.mappings[at].n_bytes
        if at != address + n_bytes or not found:
            raise Misuse(f"a part of a mapping before {at:#x}")
        return found

    def _grained(self, what: str, n_bytes: int, address: int = 0) -> None:
        if n_bytes <= 0 or n_bytes % self.grain or address % self.grain:
            raise Misuse(f"{what}: {n_bytes} bytes at {address:#x} in grains of {self.grain}")

    def _known_device(self, device: int) -> None:
        if not 0 <= device < self.n_devices:
            raise Misuse(f"device {device} of {self.n_devices}")

    def _known_handle(self, handle: int, what: str) -> Handle:
        known = self.handles.get(handle)
        if known is None or not known.references:
            raise Misuse(f"{what} handle {handle}, which is released")
        return known

    def _not_elsewhere(self, known: Handle, what: str) -> None:
        mine = self._file(known.fd) in self._mine
        if self.exclusive and mine and self._is_elsewhere(known):
            raise Misuse(f"{what} memory that others have imported")

    @staticmethod
    def _is_elsewhere(known: Handle) -> bool:
        try:
            fcntl.flock(known.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(known.fd, fcntl.LOCK_UN)
        return False

    def _known_stream(self, stream: int) -> None:
        if stream not in self.streams:
            raise Misuse(f"stream {stream} is not there")

    def _recorded(self, event: int, what: str) -> Event:
        known = self.events.get(event)
        if known is None or not known.recorded:
            raise Misuse(f"{what} event {event}, which is not recorded")
        return known

    @staticmethod
    def _made_on(fd: int) -> int:
        """-1: no device, it is no memory of a driver's."""
        _, found, device = os.readlink(f"/proc/self/fd/{fd}").partition(f"/memfd:{_MEMFD}")
        return int(device.split()[0]) if found else -1

    @staticmethod
    def _file(fd: int) -> tuple[int, int]:
        stat = os.fstat(fd)
        return stat.st_dev, stat.st_ino


_NOT_CALLS = {
    *("fail", "launch", "put", "run", "elsewhere", "is_clean", "current"),
    *("lose", "when_lost"),
}
for _name, _call in list(vars(FakeDriver).items()):
    if inspect.isfunction(_call) and not _name.startswith("_") and _name not in _NOT_CALLS:
        setattr(FakeDriver, _name, _checked(_name, _call))
