"""Check that this machine has the GPUs and the memory of a fleet, before anything is loaded.

Used by `ballast serve`, `ballast bench` and `ballast doctor`. Allocates nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ballast.core.errors import ConfigError, DeviceError
from ballast.core.settings import FleetSettings
from ballast.core.units import format_bytes
from ballast.memory.cuda.probe import gpu_bytes
from ballast.memory.host_memory import Bound, available, installed, is_granted


def check_machine(
    fleet: FleetSettings,
    memory: Callable[[], Bound] = installed,
    gpus: Callable[[], list[int]] = gpu_bytes,
) -> None:
    """Raise ConfigError for the first of `machine_faults`."""
    for fault in machine_faults(fleet, memory, gpus):
        raise fault


def machine_faults(
    fleet: FleetSettings,
    memory: Callable[[], Bound] = installed,
    gpus: Callable[[], list[int]] = gpu_bytes,
) -> Iterator[ConfigError]:
    """Yield an error for each device that the machine lacks, and for budgets beyond its memory."""
    wanted = host_budget(fleet)
    most, who = memory()
    if wanted > most:
        on_host = [i for i, (d, _) in enumerate(fleet.devices.values()) if d.gpu is None]
        key = f"devices[{on_host[0]}].budget" if len(on_host) == 1 else "budgets of all devices"
        has = "grants" if is_granted(who) else "has"
        why = f"{who} {has} {format_bytes(most)} of memory in all, which weights on the host share"
        yield ConfigError(key, format_bytes(wanted), why)
    yield from _gpu_faults(fleet, gpus)


def host_budget(fleet: FleetSettings) -> int:
    """Return the bytes of host memory that devices of the fleet may use."""
    return sum(d.budget_bytes for d, _ in fleet.devices.values() if d.gpu is None)


def memory_warning(fleet: FleetSettings, memory: Callable[[], Bound] = available) -> str | None:
    """Return a warning if budgets exceed the memory that is available now, else None."""
    wanted, (left, who) = host_budget(fleet), memory()
    if wanted <= left:
        return None
    now = f"{format_bytes(left)} ({who})"
    return f"budgets of {format_bytes(wanted)} exceed the memory that is available now, {now}"


def _gpu_faults(fleet: FleetSettings, gpus: Callable[[], list[int]]) -> Iterator[ConfigError]:
    if not fleet.has_gpus:
        return
    try:
        sizes, why = gpus(), "CUDA shows none"
    except DeviceError as error:
        sizes, why = [], str(error)
    for i, (device, _) in enumerate(fleet.devices.values()):
        if device.gpu is None:
            continue
        if not sizes:
            cure = (
                f"this machine has no GPU that CUDA can use ({why}): see `ballast doctor`; "
                "to serve on the CPU, leave `name` out"
            )
            yield ConfigError(f"devices[{i}].name", device.name, cure)
            return
        if device.gpu >= len(sizes):
            there = ", ".join(f"cuda:{n}" for n in range(len(sizes)))
            yield ConfigError(f"devices[{i}].name", device.name, f"CUDA shows {there}")
            continue
        most = sizes[device.gpu]
        if device.budget_bytes > most:
            what = f"{device.name} has {format_bytes(most)} in all"
            yield ConfigError(f"devices[{i}].budget", format_bytes(device.budget_bytes), what)
