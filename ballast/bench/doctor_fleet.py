"""Check a fleet file against this machine: each model loads, and fits into its device's budget.

Used by `bench.doctor`. Holds one model's weights at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ballast.bench import doctor_memory
from ballast.bench.doctor_finding import Finding, Verdict, judged
from ballast.bench.host_loading import divergence_as_served, load_as_served
from ballast.cluster.machine_check import host_budget
from ballast.cluster.placing import homes_of
from ballast.cluster.tensor_parallel.rank_machine import settings_of_rank
from ballast.core.capability import GpuReach
from ballast.core.errors import BallastError, ConfigError, DeviceError
from ballast.core.model import (
    BLOCK_TOKENS,
    ModelSpec,
    kv_room,
    plain_kv,
    uniform_kv,
    weight_bytes,
    weight_pages,
)
from ballast.core.settings import DeviceSettings, FleetSettings, ModelSettings
from ballast.core.units import KiB, format_bytes
from ballast.engine.sizing import check_room, pages_aside, set_aside
from ballast.isolation.calls import Isolation
from ballast.kv.layout import Layout, divided_blocks, fitted
from ballast.live.never_run import WHERE, never_run
from ballast.memory.cuda.devices import reach_of
from ballast.memory.cuda.driver import CudaDriver
from ballast.models.parallel.model import check_parallel
from ballast.policy.presets import preset_of
from ballast.policy.requirements import Requirements
from ballast.weights import packing
from ballast.weights.checkpoint import clipped_context, read_spec
from ballast.weights.gguf_tensors import is_gguf_checkpoint
from ballast.weights.host import HostModel
from ballast.weights.manifest import fork_zygote
from ballast.weights.stored import find_tensors, quantised_types


def fleet(settings: FleetSettings) -> Iterator[Finding]:
    """One finding per model, then those of the whole. Holds one model's weights at a time."""
    with fork_zygote() as isolation:
        yield from _fleet(settings, isolation)


def _fleet(settings: FleetSettings, isolation: Isolation) -> Iterator[Finding]:
    specs: list[ModelSpec] = []
    faults: list[Finding] = []
    for model in settings.models:
        try:
            host = load_as_served(model, settings, isolation)
        except BallastError as error:
            cure = "mend or replace the checkpoint, or take the model out of the file"
            faults.append(Finding(model.name, Verdict.FAIL, str(error), cure))
            faults += _without_base(model)
            continue
        specs.append(host.spec)
        for a in host.adapters:
            found = f"an adapter of {model.name}, of rank {a.spec.rank}"
            yield judged(a.spec.name, f"{found}, {format_bytes(a.segment.n_bytes)}", "")
        yield from _formats(model, host, settings)
        if (clipped := clipped_context(model, host.spec)) is not None:
            cure = "lower `limits.context`, or leave it out"
            faults.append(Finding(model.name, Verdict.WARN, clipped, cure))
        for name, why in host.failed.items():
            cure = "mend or replace the adapter, or take it out of the file"
            faults.append(Finding(name, Verdict.FAIL, why, cure))
        host.close()
    yield from faults
    if not specs:
        return
    try:
        homes = homes_of(settings)
    except ConfigError as error:
        cure = "raise `devices[i].budget`, or take the model out of the file"
        yield Finding("devices", Verdict.FAIL, str(error), cure)
        return
    devices = [device for device, _ in settings.devices.values()]
    requires = preset_of(settings).requires
    for i, device in enumerate(devices):
        here = [spec for spec in specs if device.name in homes[spec.name]]
        own = [_as_kept(spec, settings, device) for spec in here]
        where = f" on {device.name}" if settings.others else ""
        if own and device.tensor_parallel > 1:
            yield from _group([s.name for s in own], settings, device, i, where, isolation)
        elif own:
            yield from _device(own, device, i, where, requires)
            if requires.kv_staging or settings.others:
                yield from _divided(own, device)
        if unproven := never_run(settings, device):
            cure = "do without, or expect faults"
            found = f"no GPU has ever run {'; '.join(unproven)}: see {WHERE}"
            yield judged(f"never run{where}", found, cure, warn=True)
    if settings.others:
        yield lending_finding(settings)
    weights = weight_bytes(specs)
    budget = host_budget(settings)
    named = "the budgets" if settings.others else "the budget"
    what = f"{named} and all weights on the host"
    yield doctor_memory.room(budget + weights, what, surely=False)


def _formats(model: ModelSettings, host: HostModel, settings: FleetSettings) -> Iterator[Finding]:
    """Report quantised weights, and how much KV in 8 bits changes."""
    is_gguf = is_gguf_checkpoint(Path(model.path))
    types = quantised_types(find_tensors(Path(model.path)).values())
    if types or is_gguf:
        found = packing.words_on_forms(host.segments, types, host.spec.dtype)
        what = "a GGUF file" if is_gguf else "quantised"
        yield judged(model.name, f"{what}: {found}", "")
    if (divergence := divergence_as_served(host, settings)) is not None:
        found = f"KV in {model.kv_dtype}: {divergence}"
        cure = "leave `kv_dtype` out for KV in the model's dtype"
        yield judged(model.name, found, cure, warn=True)


def _as_kept(spec: ModelSpec, settings: FleetSettings, device: DeviceSettings) -> ModelSpec:
    """Return a model's sizes with what the device keeps of its KV."""
    if device.gpu is not None:
        kept = uniform_kv(spec)
    elif preset_of(settings).requires.kv_staging or settings.kv.host_bytes:
        kept = plain_kv(spec)
    else:
        return spec
    wanted = next(m.block_tokens for m in settings.models if m.name == spec.name)
    return fitted(replace(kept, block_tokens=BLOCK_TOKENS), wanted, device.page_bytes)


def _divided(specs: Sequence[ModelSpec], device: DeviceSettings) -> Iterator[Finding]:
    """Warn of models whose KV borrows no memory, and is never staged."""
    cure = "leave `block_tokens` out, or give the device a larger `page`"
    for spec in specs:
        if (found := divided_blocks(spec, device.page_bytes)) is not None:
            yield Finding(spec.name, Verdict.WARN, found, cure)


def _without_base(model: ModelSettings) -> Iterator[Finding]:
    """Fail the adapters of a model that cannot be loaded, by their own faults where known."""
    for adapter in model.adapters:
        why = adapter.fault or f"its base {model.name} cannot be loaded"
        yield Finding(adapter.name, Verdict.FAIL, why, "see its base")


def _group(
    names: list[str],
    settings: FleetSettings,
    device: DeviceSettings,
    i: int,
    where: str,
    isolation: Isolation,
) -> Iterator[Finding]:
    """Check a device of several ranks: the memory of each rank."""
    specs: list[ModelSpec] = []
    for model in settings.models:
        if model.name not in names:
            continue
        try:
            check_parallel(model, device.tensor_parallel)
            spec = read_spec(model, device.tensor_parallel, isolation)
            specs.append(fitted(spec, model.block_tokens, device.page_bytes))
        except BallastError as error:
            cure = f"change `devices[{i}].tensor_parallel`, or place the model elsewhere"
            yield Finding(model.name + where, Verdict.FAIL, str(error), cure)
    if specs:
        requires = preset_of(settings).requires
        yield from _device(specs, settings_of_rank(device), i, f"{where}, on each rank", requires)


def lending_finding(settings: FleetSettings) -> Finding:
    """List the devices that can lend pages to each other, and the reasons where they cannot."""
    ways = settings.lending(_reaches(settings))
    unable = [f"{c.lender} cannot to {c.borrower}: {c.why}" for c in ways if not c.means]
    parts = [f"{len(ways) - len(unable)} of {len(ways)} ways between devices", *unable]
    return judged("lending", "; ".join(parts), "")


def _reaches(settings: FleetSettings) -> dict[str, GpuReach | None]:
    """Return the reach of each device's GPU; empty where this process cannot use them."""
    gpus = {name: d.gpu for name, (d, _) in settings.devices.items() if d.gpu is not None}
    if not gpus:
        return {}
    try:
        driver = CudaDriver()
        return {name: reach_of(driver, gpu) for name, gpu in gpus.items()}
    except DeviceError:
        return {}


def _device(
    specs: list[ModelSpec], device: DeviceSettings, i: int, where: str, requires: Requirements
) -> Iterator[Finding]:
    """Findings about one device, `devices[i]`, and its models, which it takes in and refuses as a
    server does; `requires`: the memory policy's."""
    served: list[ModelSpec] = []
    refused: dict[str, str] = {}
    for spec in specs:
        try:
            check_room(spec, served, device, in_place=requires.in_place)
        except ConfigError as error:
            refused[spec.name] = str(error)
        else:
            served.append(spec)
    for spec in specs:
        there = [*(o for o in served if o is not spec), spec]
        yield _model(spec, there, device, i, where, requires, refused.get(spec.name))
    yield _budget(specs, device, where)


def _model(
    spec: ModelSpec,
    there: list[ModelSpec],
    device: DeviceSettings,
    i: int,
    where: str,
    requires: Requirements,
    refused: str | None,
) -> Finding:
    """Report the longest request that a device serves beside the other models in `there`.

    `refused`: why the device cannot serve the model at all.
    """
    page = device.page_bytes
    layout = Layout.of(spec, page)
    weights = spec.weight_pages(page)
    full = layout.pages(spec.blocks_of(spec.max_model_len))
    left = device.budget_bytes // page - pages_aside(there, device)
    beside = () if requires.in_place else [o for o in there if o.pinned or o is spec]
    alone = kv_room(left, beside, page, None)
    kept = "" if spec.kv_dtype == "auto" else f"in {spec.kv_dtype}, "
    tokens = spec.tokens_in(max(0, alone // layout.slab_pages) * layout.blocks_per_slab)
    found = (
        f"{spec.dtype}, {format_bytes(weights * page)} of weights, "
        f"KV {kept}{format_bytes(spec.kv_bytes_per_token)} a token ({layout.waste:.0%} waste), "
        f"{tokens} tokens if alone"
    )
    # Exact: it is written into the fleet file.
    least = (device.budget_bytes // page + full - alone) * page // KiB
    least *= device.tensor_parallel
    return judged(
        spec.name + where,
        found if refused is None else refused,
        f"a request of {spec.max_model_len} tokens needs a budget of {least}KiB; "
        f"raise `devices[{i}].budget` or lower `limits.context`",
        fail=refused is not None,
        warn=alone < full,
    )


def _budget(specs: list[ModelSpec], device: DeviceSettings, where: str) -> Finding:
    page, arena = device.page_bytes, set_aside(specs, device)
    weights = weight_pages(specs, page) * page
    what = "activations and CUDA graphs" if device.graph_bytes else "activations"
    found = (
        f"{format_bytes(device.budget_bytes)}: {format_bytes(arena)} for {what}, "
        f"all weights together {format_bytes(weights)}"
    )
    return judged(
        "budget" + where,
        found + ("" if weights + arena <= device.budget_bytes else ": models will take turns"),
        "",
    )
