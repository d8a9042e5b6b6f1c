"""Check GPUs and MIG slices for `ballast doctor`; reads their state and changes nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ballast.bench.doctor_finding import Finding, judged
from ballast.core.errors import DeviceError, install_extra
from ballast.core.units import format_bytes
from ballast.fleet.fleet_draft import gpu_device
from ballast.live.never_run import FEATURES, WHERE
from ballast.memory.cuda.bandwidth import measure_bandwidth
from ballast.memory.cuda.calls import Driver
from ballast.memory.cuda.devices import Gpu, find_gpus
from ballast.memory.cuda.driver import CudaDriver

_LOADED = Path("/proc/driver/nvidia/version")
_PROFILE = re.compile(r" MIG (\d+g\.\d+gb)")
"""The profile in a slice's name, as `NVIDIA H100 80GB HBM3 MIG 1g.10gb`."""


def gpus(nvml: Any = None, driver: Driver | None = None) -> Iterator[Finding]:
    """Yield a finding for each GPU, and one that lists Ballast's features that no GPU has run yet;
    none on a machine without GPUs. `nvml` takes the place of `pynvml`."""
    driver = driver or _driver()
    try:
        found = find_gpus(driver, nvml)
    except DeviceError as error:
        if _LOADED.exists():
            yield judged("gpus", str(error), install_extra("cuda"), warn=True)
        return
    for i, gpu in enumerate(found):
        description = _description(gpu)
        if driver is not None and gpu.ordinal is not None:
            description += f", {_reached(driver, gpu.ordinal)}"
        if gpu.slice_of is not None:
            # CUDA shows a process one slice, which is its first device.
            entry = gpu_device(0, gpu.memory_bytes)
            description += f"; devices: [{entry}] with CUDA_VISIBLE_DEVICES={gpu.uuid}"
        yield judged(f"gpu {i}", description, "name it in CUDA_VISIBLE_DEVICES", warn=_hidden(gpu))
    for layout in simulated_layouts(found):
        yield judged("slices", f"simulate and plan with --devices {layout}", "")
    if found:
        yield judged("never run", f"{'; '.join(FEATURES)}: see {WHERE}", "")


def simulated_layouts(found: Sequence[Gpu]) -> list[str]:
    """Return the layout of each GPU that is cut into MIG slices, as `--devices` of a simulation has
    it; none of devices and slices that simulations do not know."""
    from ballast.sim.slices import PROFILES

    cut: dict[str, list[Gpu]] = {}
    for gpu in found:
        if gpu.slice_of is not None:
            cut.setdefault(gpu.slice_of, []).append(gpu)
    layouts = []
    for slices in cut.values():
        names = [match[1] if (match := _PROFILE.search(s.name)) else "" for s in slices]
        for device, profiles in PROFILES.items():
            board = device.partition("-")[0]
            known = {profile.name for profile in profiles}
            if re.search(rf"\b{board}\b", slices[0].name) and known.issuperset(names):
                layouts.append(f"{device}:{'+'.join(names)}")
    return layouts


def _reached(driver: Driver, ordinal: int) -> str:
    try:
        r = measure_bandwidth(driver, ordinal)
    except DeviceError as error:
        return f"copies not measured: {error}"
    way = f"copies {r.to_device / 1e9:.3g} GB/s to it and {r.to_host / 1e9:.3g} to the host"
    return f"{way}, memory {r.memory / 1e9:.3g} GB/s"


def _driver() -> Driver | None:
    try:
        return CudaDriver()
    except DeviceError:
        return None


def _hidden(gpu: Gpu) -> bool:
    """CUDA shows a process at most one MIG slice, so one it does not show is no fault."""
    return gpu.ordinal is None and gpu.slice_of is None


def _description(gpu: Gpu) -> str:
    parts = [gpu.name, f"{format_bytes(gpu.memory_bytes)}, {format_bytes(gpu.free_bytes)} free"]
    if gpu.multiprocessors is not None:
        parts.append(f"{gpu.multiprocessors} multiprocessors")
    if gpu.pcie is not None:
        best = gpu.pcie_bytes_per_second
        rate = "" if best is None else f" (at best {best / 1e9:.0f} GB/s one way)"
        parts.append(f"PCIe {gpu.pcie[0]} x{gpu.pcie[1]}{rate}")
    if gpu.nvlinks:
        parts.append(f"{gpu.nvlinks} NVLinks of version {gpu.nvlink_version}")
    if gpu.reads:
        over = len(set(gpu.reads) & set(gpu.reads_over_nvlink))
        parts.append(f"uses the memory of {len(gpu.reads)} others in place, {over} over NVLink")
    if _hidden(gpu):
        parts.append("not visible to this process")
    return ", ".join(parts)
