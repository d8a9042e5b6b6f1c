"""Divide simulated GPUs into MIG slices, equal or not, by the layouts that the driver offers.

A slice has its part of the multiprocessors, of the memory and of its bandwidth; all slices of a
device share its link to the host. Used by `sim.cluster`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass

from ballast.core.cost import StepCosts
from ballast.core.errors import ConfigError
from ballast.core.model import ModelSpec
from ballast.sim.profile import DeviceProfile
from ballast.sim.roofline import Hardware

MEMORY_PARTS = 8
"""Parts in which MIG divides memory and its bandwidth."""
COMPUTE_PARTS = 7
"""Parts in which MIG divides the multiprocessors, not all of the same size."""


@dataclass(frozen=True, slots=True)
class MigSlice:
    """A MIG instance profile of a device."""

    name: str
    """As the driver has it: `3g.48gb`."""
    compute: int
    """Of `COMPUTE_PARTS`."""
    memory: int
    """Of `MEMORY_PARTS`: of the memory and of its bandwidth."""
    multiprocessors: int

    def of(self, whole: Hardware) -> Hardware:
        """Return the peaks of the slice. The link is the whole device's, which slices share."""
        part = self.memory / MEMORY_PARTS
        compute = self.multiprocessors / whole.multiprocessors
        return whole.model_copy(
            update={
                "memory_bytes": int(whole.memory_bytes * part),
                "memory_bandwidth": whole.memory_bandwidth * part,
                "flops": whole.flops * compute,
                "multiprocessors": self.multiprocessors,
            }
        )


def _profiles(multiprocessors: Sequence[int], gigabytes: Sequence[int]) -> tuple[MigSlice, ...]:
    """Build a device's profiles: multiprocessors of 1g, 1g with twice the memory, 2g, 3g, 4g, 7g,
    and gigabytes in the names of an eighth, a quarter, a half, and all of the memory."""
    shapes = ((1, 1), (1, 2), (2, 2), (3, 4), (4, 4), (7, 8))
    names = dict(zip((1, 2, 4, 8), gigabytes, strict=True))
    return tuple(
        MigSlice(f"{compute}g.{names[memory]}gb", compute, memory, n)
        for (compute, memory), n in zip(shapes, multiprocessors, strict=True)
    )


# Memory and compute parts: NVIDIA's MIG user guide. Multiprocessors: `nvidia-smi mig -lgip` as
# published for A100, H100, H200 and GH200 (NVIDIA/mig-parted, issue 120 and pull 139).
_AMPERE = (14, 14, 28, 42, 56, 98)
_HOPPER = (16, 26, 32, 60, 64, 132)
PROFILES: Mapping[str, tuple[MigSlice, ...]] = {
    "A100-80G": _profiles(_AMPERE, (10, 20, 40, 80)),
    "H100-80G": _profiles(_HOPPER, (10, 20, 40, 80)),
    "H200": _profiles(_HOPPER, (18, 35, 71, 141)),
    "GH200-96G": _profiles(_HOPPER, (12, 24, 48, 96)),
}
"""MIG profiles by device."""
_EQUAL = {1: (7, 8), 2: (3, 4), 3: (2, 2), 4: (1, 2), 7: (1, 1)}
"""Compute and memory parts of each of so many equal slices, the most that fit."""


def equal_slices(device: str, number: int) -> tuple[MigSlice, ...]:
    """Return `number` equal slices of a device, as large as they can be. Raises ConfigError."""
    known = _of(device)
    if number not in _EQUAL:
        allowed = ", ".join(map(str, _EQUAL))
        raise ConfigError(f"{device}: slices", number, f"equal slices are {allowed}")
    (found,) = (p for p in known if (p.compute, p.memory) == _EQUAL[number])
    return (found,) * number


def named_slices(device: str, text: str) -> tuple[MigSlice, ...]:
    """Return the slices of a layout such as `3g+2g+1g.12gb+1g`; `1g` alone has the least memory.

    Raises ConfigError: an unknown profile, or slices that do not fit on one device together.
    """
    known = _of(device)
    by_name = {p.name: p for p in reversed(known)} | {f"{p.compute}g": p for p in reversed(known)}
    slices = []
    for name in text.split("+"):
        if name not in by_name:
            allowed = ", ".join(p.name for p in known)
            raise ConfigError(f"{device}: slices", name, f"its profiles are {allowed}")
        slices.append(by_name[name])
    check_fit(device, slices)
    return tuple(slices)


def check_fit(device: str, slices: Iterable[MigSlice]) -> None:
    """Raise ConfigError unless one device has these slices at the same time."""
    chosen = list(slices)
    parts = (sum(s.compute for s in chosen), sum(s.memory for s in chosen))
    if parts[0] > COMPUTE_PARTS or parts[1] > MEMORY_PARTS:
        allowed = (
            f"at most {COMPUTE_PARTS} parts of compute and {MEMORY_PARTS} of memory together; "
            f"these have {parts[0]} and {parts[1]}"
        )
        raise ConfigError(f"{device}: slices", "+".join(s.name for s in chosen), allowed)


def slice_costs(profile: DeviceProfile, part: MigSlice, model: ModelSpec) -> StepCosts:
    """Return a model's costs on a slice: those on the whole device, measured or not, each changed
    by as much as the roofline's is between the two.

    Raises ConfigError for a model or device without a roofline.
    """
    whole = profile.costs(model)
    least = astuple(profile.roofline(model))
    there = astuple(profile.on(part.of(_hardware(profile))).roofline(model))
    scaled = (
        seconds * slow / fast if fast else slow
        for seconds, slow, fast in zip(astuple(whole), there, least, strict=True)
    )
    return StepCosts(*scaled)


def _hardware(profile: DeviceProfile) -> Hardware:
    if profile.hardware is None:
        raise ConfigError("devices", profile.device, "slices need the profile's `hardware`")
    return profile.hardware


def _of(device: str) -> tuple[MigSlice, ...]:
    if device not in PROFILES:
        raise ConfigError("devices", f"{device}: slices", f"MIG layouts: {', '.join(PROFILES)}")
    return PROFILES[device]
