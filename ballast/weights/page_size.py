"""Choose the page size of CPU devices whose fleet file states none: large if their models are
large.

Used by the command line when it reads a fleet file. Remapping a page costs the same whatever its
size, so a fleet of large models trades memory eight times as fast in pages of 2 MiB as in pages of
256 KiB. Small models would lose much of such pages to rounding: each layer is a segment of whole
pages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from ballast.core.errors import CheckpointError
from ballast.core.settings import DeviceSettings, FleetSettings, KvLayout, ModelSettings
from ballast.core.units import MiB
from ballast.weights.stored import served_tensors

LARGE_PAGE = 2 * MiB
"""Bytes that one page table covers on x86-64, and on arm64 with pages of 4 KiB."""
MOST_WASTE = 0.05
"""Part of a model's weights that rounding segments up to large pages may add."""
LEAST_PAGES = 128
"""Least large pages of a device: with fewer, the unit by which one model's KV cache grows would be
too large a part of the device."""

KV_PAGES = 32
"""Large pages left beside weights, for KV and activations."""


def with_page_sizes(fleet: FleetSettings) -> FleetSettings:
    """Return `fleet` with large pages on all CPU devices without a page size, if models fit them.

    The models of a device are those whose settings name it, or no device. CPU devices get the same
    size, that of one that states its own, as pages are lent and KV moves between equal ones only.
    Nothing changes if KV lies layer by layer, which grows by pages of all layers at once, or if a
    checkpoint cannot be read: loading it then reports the fault. Models with a `fault` do not
    count.
    """
    devices = [device for device, _ in fleet.devices.values()]
    unsized = {device.name: device for device in devices if _is_unsized(device)}
    others = [d for d in devices if d.gpu is None and d.name not in unsized]
    layered = any(d.kv_layout is KvLayout.PER_LAYER for d in unsized.values())
    if not unsized or layered or any(d.page_bytes != LARGE_PAGE for d in others):
        return fleet
    models = [m for m in fleet.models if not m.fault]
    sizes = {m.name: _segment_bytes(m) for m in models}
    for device in unsized.values():
        own = [m for m in models if not m.devices or device.name in m.devices]
        segments = [sizes[m.name] for m in own]
        if not _fit_large_pages(segments, device) or _crowd(own, sizes, device):
            return fleet
    first, *rest = (
        replace(device, page_bytes=LARGE_PAGE) if device.name in unsized else device
        for device in devices
    )
    return replace(fleet, device=first, others=tuple(rest))


def _is_unsized(device: DeviceSettings) -> bool:
    return device.gpu is None and not device.page_given


def _fit_large_pages(models: Iterable[Mapping[str, int] | None], device: DeviceSettings) -> bool:
    """Whether no model (bytes by segment; None: unknown) wastes much of large pages there."""
    ranks = device.tensor_parallel
    if device.budget_bytes // ranks // LARGE_PAGE < LEAST_PAGES:
        return False
    return all(
        segments is not None and waste(segments.values(), LARGE_PAGE, ranks) <= MOST_WASTE
        for segments in models
    )


def _crowd(
    models: Iterable[ModelSettings],
    sizes: Mapping[str, Mapping[str, int] | None],
    device: DeviceSettings,
) -> bool:
    """Whether rounding leaves too little beside the weights that have to be resident together: of
    all models, if the budget holds them at all, else of the pinned ones and the largest other."""
    ranks = device.tensor_parallel
    budget = device.budget_bytes // ranks - KV_PAGES * LARGE_PAGE
    exact, rounded = {}, {}
    for m in models:
        parts = [n / ranks for n in (sizes[m.name] or {}).values()]
        exact[m] = sum(parts)
        rounded[m] = sum(math.ceil(n / LARGE_PAGE) * LARGE_PAGE for n in parts)
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


def _segment_bytes(model: ModelSettings) -> dict[str, int] | None:
    """Estimate bytes by segment: tensors whose names have the same first number are a layer's,
    those without one lie together. None if the checkpoint's headers cannot be read."""
    try:
        tensors = served_tensors(Path(model.path), model.dtype)
    except (CheckpointError, OSError):
        return None
    found: dict[str, int] = {}
    for name, n_bytes in tensors.items():
        layer = next((part for part in name.split(".") if part.isdigit()), "")
        found[layer] = found.get(layer, 0) + n_bytes
    return found or None
