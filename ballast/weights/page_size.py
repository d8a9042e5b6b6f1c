"""Choose the page size of devices whose fleet file states none: large if their models are large.

Used by the command line when it reads a fleet file. Remapping a page costs the same whatever its
size, so a fleet of large models trades memory eight times as fast in pages of 2 MiB as in pages of
256 KiB. Small models would lose much of such pages to rounding: each layer is a segment of whole
pages. On GPUs, where a driver takes as long to map 2 MiB as the link to fill it, models of billions
of parameters have pages of 8 to 32 MiB.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from ballast.core.errors import CheckpointError
from ballast.core.settings import DeviceSettings, FleetSettings, ModelSettings
from ballast.core.units import MiB, format_bytes
from ballast.weights.stored import served_tensors

LARGE_PAGE = 2 * MiB
"""Bytes that one page table covers on x86-64, and on arm64 with pages of 4 KiB."""
GPU_PAGES = (32 * MiB, 16 * MiB, 8 * MiB)
"""Pages of GPUs whose models are large enough, the best first; others have `GPU_PAGE`."""
MOST_WASTE = 0.05
"""Part of a model's weights that rounding segments up to large pages may add."""
LEAST_PAGES = 128
"""Least large pages of a device: with fewer, the unit by which one model's KV cache grows would be
too large a part of the device."""

KV_PAGES = 32
"""Large pages left beside weights, for KV and activations."""

log = logging.getLogger(__name__)


def with_page_sizes(fleet: FleetSettings) -> FleetSettings:
    """Return `fleet` with large pages on all devices without a page size, if models fit them.

    The models of a device are those whose settings name it, or no device. CPU devices get the same
    size, that of one that states its own, as pages are lent and KV moves between equal ones only;
    so do GPUs. Nothing changes if a checkpoint cannot be read: loading it then reports the fault.
    """
    for on_gpu, pages in ((False, (LARGE_PAGE,)), (True, GPU_PAGES)):
        fleet = _sized(fleet, on_gpu, pages)
    return fleet


def _sized(fleet: FleetSettings, on_gpu: bool, pages: tuple[int, ...]) -> FleetSettings:
    """Return `fleet` with the first of `pages` that fits on the devices of one kind."""
    devices = [d for d, _ in fleet.devices.values() if (d.gpu is not None) is on_gpu]
    unsized = [device for device in devices if not device.page_given]
    stated = {device.page_bytes for device in devices if device.page_given}
    if not unsized:
        return fleet
    sizes = {m.name: _segment_bytes(m, packed=not on_gpu) for m in fleet.models}
    for page in pages:
        if stated <= {page} and all(_fits(fleet, sizes, d, page) for d in unsized):
            return _with_page(fleet, unsized, page, sizes)
    return fleet


Sizes = Mapping[str, Mapping[str, int] | None]
"""Bytes by model and segment; None: unknown."""


def _with_page(
    fleet: FleetSettings, unsized: list[DeviceSettings], page: int, sizes: Sizes
) -> FleetSettings:
    names = {device.name for device in unsized}
    most = max((waste((s or {}).values(), page) for s in sizes.values()), default=0.0)
    log.info(
        "pages of %s on %s: weights take up to %.1f %% more",
        format_bytes(page),
        ", ".join(sorted(names)),
        100 * most,
    )
    first, *rest = (
        replace(device, page_bytes=page) if device.name in names else device
        for device, _ in fleet.devices.values()
    )
    return replace(fleet, device=first, others=tuple(rest))


def _fits(fleet: FleetSettings, sizes: Sizes, device: DeviceSettings, page: int) -> bool:
    """Whether the device's models waste little of such pages, and leave room beside them."""
    own = [m for m in fleet.models if not m.devices or device.name in m.devices]
    segments = [s.values() for m in own if (s := sizes[m.name]) is not None]
    if len(segments) < len(own):
        return False
    suits = _suits(segments, device.budget_bytes, page, device.tensor_parallel)
    return suits and not _crowd(own, sizes, device, page)


def gpu_page(models: Iterable[Collection[int]], budget_bytes: int) -> int:
    """Return the bytes of a page of a GPU of `budget_bytes` for models of these segments, which
    leave room beside them."""
    models = list(models)
    suiting = (page for page in GPU_PAGES if _suits(models, budget_bytes, page))
    return next(suiting, LARGE_PAGE)


def _suits(models: Iterable[Collection[int]], budget: int, page: int, ranks: int = 1) -> bool:
    """Whether models, by their segments' bytes, waste little of such pages of a device."""
    if budget // ranks // page < LEAST_PAGES:
        return False
    return all(waste(segments, page, ranks) <= MOST_WASTE for segments in models)


def _crowd(
    models: Iterable[ModelSettings], sizes: Sizes, device: DeviceSettings, page: int
) -> bool:
    """Whether rounding leaves too little beside the weights that have to be resident together: of
    all models, if the budget holds them at all, else of the pinned ones and the largest other."""
    ranks = device.tensor_parallel
    budget = device.budget_bytes // ranks - KV_PAGES * page
    exact, rounded = {}, {}
    for m in models:
        parts = [n / ranks for n in (sizes[m.name] or {}).values()]
        exact[m] = sum(parts)
        rounded[m] = sum(math.ceil(n / page) * page for n in parts)
    together = sum(rounded[m] for m in rounded if m.pinned)
    together += max((rounded[m] for m in rounded if not m.pinned), default=0)
    if sum(exact.values()) <= budget:
        together = sum(rounded.values())
    return together > budget


def waste(segments: Iterable[int], page_bytes: int, ranks: int = 1) -> float:
    """Return the bytes added by rounding segments up to pages, as a part of the segments' bytes;
    each of `ranks` has an equal part of every segment, in pages of its own."""
    parts = [n / ranks for n in segments]
    backed = sum(math.ceil(n / page_bytes) * page_bytes for n in parts)
    return backed / max(1, sum(parts)) - 1


def _segment_bytes(model: ModelSettings, *, packed: bool) -> dict[str, int] | None:
    """Estimate bytes by segment: tensors whose names have the same first number are a layer's,
    those without one lie together. None if the checkpoint's headers cannot be read."""
    try:
        packed = packed and model.linear != "plain"
        tensors = served_tensors(Path(model.path), model.dtype, packed=packed)
    except (CheckpointError, OSError):
        return None
    found: dict[str, int] = {}
    for name, n_bytes in tensors.items():
        layer = next((part for part in name.split(".") if part.isdigit()), "")
        found[layer] = found.get(layer, 0) + n_bytes
    return found or None
