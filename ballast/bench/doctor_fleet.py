"""A fleet file against the machine: does each model load, and does the budget fit?"""

from __future__ import annotations

from collections.abc import Iterator

from ballast.bench import doctor_memory
from ballast.bench.finding import Finding, Verdict, judged
from ballast.core.cost import activation_bytes
from ballast.core.errors import BallastError
from ballast.core.model import ModelSpec, weight_bytes, weight_pages
from ballast.core.settings import DeviceSettings, FleetSettings
from ballast.core.units import KiB, ceil_div, format_bytes
from ballast.kv.layout import Layout
from ballast.weights.checkpoint import load_host_model


def fleet(settings: FleetSettings) -> Iterator[Finding]:
    """One finding per model, then those of the whole. Holds one model's weights at a time."""
    specs: list[ModelSpec] = []
    faults: list[Finding] = []
    for model in settings.models:
        try:
            host = load_host_model(model)
        except BallastError as error:
            cure = "mend or replace the checkpoint, or take the model out of the file"
            faults.append(Finding(model.name, Verdict.FAIL, str(error), cure))
            continue
        specs.append(host.spec)
        for name, why in host.failed.items():
            cure = "mend or replace the adapter, or take it out of the file"
            faults.append(Finding(name, Verdict.FAIL, why, cure))
        host.close()
    yield from faults
    if not specs:
        return
    device = settings.device
    arena = max(activation_bytes(s, device.step_tokens, device.step_logits) for s in specs)
    left = device.budget_bytes // device.page_bytes - ceil_div(arena, device.page_bytes)
    for spec in specs:
        yield _model(spec, device, left)
    yield _budget(specs, device, arena)
    weights = weight_bytes(specs)
    yield doctor_memory.room(
        device.budget_bytes + weights, "the budget and all weights on the host"
    )


def _model(spec: ModelSpec, device: DeviceSettings, left: int) -> Finding:
    """`left`: pages of the device that are not kept for activations."""
    page = device.page_bytes
    layout = Layout.of(spec, page)
    weights = spec.weight_pages(page)
    full = layout.pages(ceil_div(spec.max_model_len, spec.block_tokens))
    alone = left - weights
    tokens = max(0, alone // layout.slab_pages) * layout.blocks_per_slab * spec.block_tokens
    found = (
        f"{spec.dtype}, {format_bytes(weights * page)} of weights, "
        f"KV {format_bytes(spec.kv_bytes_per_token)} a token ({layout.waste:.0%} waste), "
        f"{tokens} tokens if alone"
    )
    # Exact: it is written into the fleet file.
    least = (device.budget_bytes // page + weights + full - left) * page // KiB
    return judged(
        spec.name,
        found,
        f"a request of {spec.max_model_len} tokens needs a budget of {least}KiB; "
        "raise `devices[0].budget` or lower `limits.context`",
        fail=alone < layout.slab_pages,
        warn=alone < full,
    )


def _budget(specs: list[ModelSpec], device: DeviceSettings, arena: int) -> Finding:
    page = device.page_bytes
    weights = weight_pages(specs, page) * page
    found = (
        f"{format_bytes(device.budget_bytes)}: {format_bytes(arena)} for activations, "
        f"all weights together {format_bytes(weights)}"
    )
    return judged(
        "budget",
        found + ("" if weights + arena <= device.budget_bytes else ": models will take turns"),
        "",
    )
