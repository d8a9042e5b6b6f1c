"""Compute the memory set aside for jobs' activations, and check that models fit beside it.

Used when a device is built, when a model joins, and by placement and `doctor`. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ballast.core.cost import lane_bytes
from ballast.core.errors import ConfigError
from ballast.core.model import ModelSpec, weight_pages
from ballast.core.settings import DeviceSettings
from ballast.core.units import KiB, MiB, ceil_div, format_bytes
from ballast.kv.layout import Layout

GPU_LANE_BYTES = 128 * MiB
"""Activation memory of a GPU of one lane, beside what tensors take: see `gpu_lane_bytes`."""
_WORKSPACE_BYTES = 32 * MiB
"""Workspace of cuBLAS on Hopper, for each thread and stream; PyTorch never gives one back."""


def _check_formats(spec: ModelSpec, settings: DeviceSettings) -> None:
    """Raise ConfigError if the device's kernels cannot read the model's KV, or its adapters."""
    if settings.gpu is not None and spec.kv_dtype != "auto":
        allowed = f"{settings.name} is a GPU: KV in 8 bits is of CPUs"
        raise ConfigError(f"{spec.name}: kv_dtype", spec.kv_dtype, allowed)
    for a in spec.adapters:
        if a.in_few_bits and settings.gpu is not None:
            allowed = f"{settings.name} is a GPU: a delta in few bits is of CPUs"
            raise ConfigError(f"{spec.name}: adapter", a.name, allowed)


def check_room(
    spec: ModelSpec,
    others: Iterable[ModelSpec],
    settings: DeviceSettings,
    *,
    in_place: bool = False,
    aside: int = 0,
) -> None:
    """Raise ConfigError if, with `spec` added to the device, it or one of `others` could serve no
    request even on an otherwise empty device.

    A model needs its weights and the first slab of its KV cache, beside what is set aside for
    activations and graphs and the weights of pinned models; or no weights, if passes read all of
    them `in_place`, in host memory. `aside`: pages that are set aside already. Sizes in the message
    are those of one rank.
    """
    _check_formats(spec, settings)
    specs = [*others, spec]
    page = settings.page_bytes
    aside = max(aside, pages_aside(specs, settings))
    for m in specs:
        there = () if in_place else [o for o in specs if o.pinned or o is m]
        weights = weight_pages(there, page)
        kv = Layout.of(m, page).slab_pages
        _check_promises(m, kv, page, in_place)
        kept = sum(o.guaranteed_kv(page, in_place) for o in specs if o is not m)
        least = aside + weights + kept + max(kv, m.guaranteed_kv(page, in_place))
        if least * page <= settings.budget_bytes:
            continue
        each = "" if settings.tensor_parallel == 1 else ", each of its ranks,"
        pinned = (
            ", those of pinned models among them"
            if any(o.pinned and o is not m for o in specs)
            else ""
        )
        kept_text = f"{format_bytes(kept * page)} guaranteed to others, " if kept else ""
        raise ConfigError(
            f"the budget of {settings.name}",
            format_bytes(settings.budget_bytes),
            f"{m.name} needs a device{each} of at least {least * page // KiB}KiB: "
            f"{format_bytes(weights * page)} for weights{pinned}, {kept_text}"
            f"{format_bytes((least - aside - weights - kept) * page)} for "
            f"{'its guaranteed' if m.guarantee else 'the first blocks of'} KV cache, "
            f"{format_bytes(aside * page)} for activations with {spec.name}",
        )


def _check_promises(m: ModelSpec, slab: int, page: int, in_place: bool) -> None:
    """Raise ConfigError if what a model is promised is less than it needs to serve one request:
    its weights, and a `slab` of KV."""
    weights = m.weight_pages(page)
    for key, given, needed in (
        ("guarantee", m.guarantee or None, slab if in_place else weights + slab),
        ("limit", m.limit, weights + slab),
    ):
        if given is not None and given < needed * page * m.ranks:
            least = format_bytes(needed * page * m.ranks)
            allowed = f"{least} at least: its weights and the first blocks of KV"
            raise ConfigError(f"{key} of {m.name}", format_bytes(given), allowed)


def largest_jobs(specs: Iterable[ModelSpec], settings: DeviceSettings) -> int:
    """Return the bytes of activations that the models' largest jobs take on all lanes together."""
    if settings.gpu is not None:  # what jobs need was measured on a CPU, if at all
        specs = [replace(s, job_memory=None) for s in specs]
    largest = lane_bytes(specs, settings.step_tokens, settings.step_logits)
    if settings.gpu is not None:
        largest += gpu_lane_bytes(settings.lanes)
    return settings.lanes * largest


def gpu_lane_bytes(lanes: int) -> int:
    """Bytes for each lane of a GPU, beside what tensors take: scores of attention that no kernel
    computes, candidates of sampling, what the allocator rounds up, and workspaces of cuBLAS. A
    lane's thread may use the stream of any run of neighbouring groups, and its twin where graphs
    are recorded. Not measured yet."""
    streams = lanes * (lanes + 1) // 2
    return GPU_LANE_BYTES + 2 * (streams - 1) * _WORKSPACE_BYTES


def set_aside(specs: Iterable[ModelSpec], settings: DeviceSettings) -> int:
    """Return the bytes of a device's budget that are set aside, not for weights or KV."""
    return largest_jobs(specs, settings) + settings.graph_bytes


def pages_aside(specs: Iterable[ModelSpec], settings: DeviceSettings) -> int:
    """Return `set_aside` in pages, rounded up for each of the two arenas."""
    page = settings.page_bytes
    return ceil_div(largest_jobs(specs, settings), page) + ceil_div(settings.graph_bytes, page)
