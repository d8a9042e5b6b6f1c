"""Draft a fleet file of models that were found: their entries, and budgets that this machine has.

Used by `ballast init`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ballast.core.cost import job_memory
from ballast.core.model import ModelSpec
from ballast.core.settings import DeviceSettings
from ballast.core.units import MiB, ceil_div, format_bytes
from ballast.fleet.model_search import FoundModel, LeftOut

KV_TOKENS = 8192
"""Tokens of KV that a budget has room for, for each model: two long conversations, or eight of
about 1,000 tokens."""
GPU_SHARE = 0.9
"""Of a GPU's memory; the rest is for the driver, and for what libraries take."""
HOST_SHARE = 0.8
"""Of the host memory that is available now, for the budget and for the weights that lie beside
it."""
STEP = 64 * MiB
"""Budgets are multiples of this."""
LEAST = 256 * MiB
DEVICE = DeviceSettings(budget_bytes=LEAST)
"""Settings of the drafted devices, for the size of their jobs."""


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """What there is to serve with."""

    gpus: tuple[int, ...]
    """Bytes of each GPU."""
    available: int
    """Bytes of host memory that can still be allocated."""


def wanted_bytes(specs: Sequence[ModelSpec]) -> int:
    """Return the bytes with which all models stay on the device at once, with KV for
    `KV_TOKENS` each, and activations; a multiple of STEP."""
    kv = sum(s.kv_bytes_per_token * min(KV_TOKENS, 2 * s.max_model_len) for s in specs)
    jobs = max(job_memory(s, DEVICE.step_tokens, DEVICE.step_logits).n_bytes for s in specs)
    return ceil_div(sum(s.weight_bytes for s in specs) + kv + jobs, STEP) * STEP


def host_budget(specs: Sequence[ModelSpec], available: int) -> int:
    """Return a CPU device's budget in bytes: what the models want, if the host has as much beside
    their weights, which it holds as well."""
    beside = sum(s.weight_bytes for s in specs)
    room = int(available * HOST_SHARE) - beside
    return max(LEAST, min(wanted_bytes(specs), room // STEP * STEP))


def draft(
    models: Sequence[FoundModel],
    specs: Mapping[str, ModelSpec],
    left: Sequence[LeftOut],
    machine: MachineMemory,
    preset: str,
) -> str:
    """Return the text of a fleet file. `specs`: by name, of the models that are no adapters."""
    every = list(specs.values())
    lines = [
        "# Made by `ballast init`; the keys are in docs/fleet-file.md.",
        f"preset: {preset}",
        "models:",
    ]
    for m in models:
        if m.base is None:
            spec = specs[m.name]
            size = f"{format_bytes(spec.weight_bytes)}, context {spec.max_model_len}"
            lines.append(f"  - {{name: {_text(m.name)}, path: {_text(m.path)}}}  # {size}")
        else:
            entry = f"name: {_text(m.name)}, adapter: {_text(m.path)}, base: {_text(m.base)}"
            lines.append(f"  - {{{entry}}}")
    lines += [f"  # left out: {_line(one.path)}: {_line(one.reason)}" for one in left]
    lines.append("devices:")
    for i, n_bytes in enumerate(machine.gpus):
        lines.append(f"  - {gpu_device(i, n_bytes)}")
    if not machine.gpus:
        budget = _size(host_budget(every, machine.available))
        lines.append(
            f"  - {{budget: {budget}}}  # all at once would take {_size(wanted_bytes(every))}"
        )
    return "\n".join(lines) + "\n"


def gpu_device(ordinal: int, n_bytes: int) -> str:
    """Return the entry of a GPU or MIG slice of `n_bytes` in a fleet file's `devices`."""
    return f"{{name: 'cuda:{ordinal}', budget: {_size(int(n_bytes * GPU_SHARE))}}}"


def _size(n_bytes: int) -> str:
    return f"{n_bytes // STEP * STEP // MiB}MiB"


def _text(value: str) -> str:
    """Quote as a YAML scalar, of which JSON's strings are a part; `${` is no variable."""
    return json.dumps(value.replace("${", "$${"), ensure_ascii=False)


def _line(text: str) -> str:
    """Put a text in one line of a comment."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())
