"""What several names of one model, and a fine-tune with its embeddings, cost beside it.

A random Llama in bfloat16 is served under three names, and once more with other layers but the same
embeddings and head. Bytes: what the host tier and the device hold for all four, against four
copies. Seconds: from asking for a model's activation until its jobs can run, with nothing of it on
the device, beside another name of the same model, and beside a model that has its embeddings and
head; `touch`: then reading one byte of each of the system's pages for the first time. Medians over
rounds, of one link without pacing.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from ballast.core.actions import Reside
from ballast.core.settings import DeviceSettings, FleetSettings, ModelSettings
from ballast.core.units import KiB, MiB, format_bytes
from ballast.core.view import Residency
from ballast.engine.apply import apply
from ballast.engine.events import handle
from ballast.live.device import LiveDevice
from ballast.memory.tensor import array_at
from benchmarks.common import finish, options

NAMES = ("base", "second", "third", "tuned")
OS_PAGE = 4 * KiB


def make(directory: Path, seed: int, layers: int) -> Path:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=layers,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    return directory


def tune(base: Path, tuned: Path) -> None:
    """Give `tuned` the embeddings, last norm and head of `base`; its layers stay its own."""
    file = "model.safetensors"
    kept, tensors = load_file(base / file), load_file(tuned / file)
    same = ("model.embed_tokens.", "model.norm.", "lm_head.")
    tensors |= {n: t for n, t in kept.items() if n.startswith(same)}
    save_file(tensors, tuned / file, {"format": "pt"})


def bring(device: LiveDevice, name: str) -> tuple[float, float]:
    """Seconds until `name` can run, and of the first look at each page of its weights."""
    state = device.state
    m = state.models[name]
    start = time.perf_counter()
    refused = apply(state, Reside(name, m.plan.whole()), [])
    assert refused is None, refused
    while m.residency is not Residency.RESIDENT:
        for event in device.inbox.take(None):
            handle(state, event)
    active = time.perf_counter()
    for s in m.weights.segments:
        array_at(s.address, (s.n_bytes,), np.uint8)[::OS_PAGE].max()
    return active - start, time.perf_counter() - active


def drop(device: LiveDevice) -> None:
    for name, m in device.state.models.items():
        if m.residency is Residency.RESIDENT:
            refused = apply(device.state, Reside(name, m.plan.without(None)), [])
            assert refused is None, refused


def main() -> None:
    args = options(__doc__)
    rounds = 3 if args.quick else 9
    with tempfile.TemporaryDirectory() as scratch:
        base = make(Path(scratch) / "base", 0, 4 if args.quick else 12)
        tuned = make(Path(scratch) / "tuned", 1, 4 if args.quick else 12)
        tune(base, tuned)
        models = tuple(
            ModelSettings(name=n, path=str(tuned if n == "tuned" else base)) for n in NAMES
        )
        settings = DeviceSettings(budget_bytes=1024 * MiB, page_bytes=256 * KiB)
        device = LiveDevice(FleetSettings(models=models, device=settings), lambda outputs: None)
    try:
        device.populate()
        taken: dict[str, list[tuple[float, float]]] = {}

        def note(what: str, name: str) -> None:
            taken.setdefault(what, []).append(bring(device, name))

        for _ in range(rounds):
            note("alone", "base")
            note("second name", "second")
            drop(device)
            note("tuned, alone", "tuned")
            drop(device)
            bring(device, "base")
            note("tuned, beside", "tuned")
            drop(device)
        for name in NAMES:
            bring(device, name)
        state = device.state
        state.pool.validate()
        pages = {o: n for o, n in device.snapshot().owners.items() if not o.startswith("arena")}
        specs = device.specs.values()
        result: dict[str, Any] = {
            "names": list(NAMES),
            "model_bytes": device.specs["base"].weight_bytes,
            "host_bytes": device.tier.n_bytes,
            "host_bytes_of_copies": sum(s.weight_bytes for s in specs),
            "device_bytes": sum(pages.values()) * settings.page_bytes,
            "device_bytes_of_copies": sum(s.weight_pages(settings.page_bytes) for s in specs)
            * settings.page_bytes,
            "seconds": {
                what: {
                    "activate": statistics.median(a for a, _ in times),
                    "touch": statistics.median(t for _, t in times),
                }
                for what, times in taken.items()
            },
        }
    finally:
        device.close()
    table = Table("", "", title="equal segments of four models")
    for key in ("host", "device"):
        shared, copies = result[f"{key}_bytes"], result[f"{key}_bytes_of_copies"]
        table.add_row(key, f"{format_bytes(shared)} of {format_bytes(copies)}")
    for what, seconds in result["seconds"].items():
        active, touch = seconds["activate"] * 1e3, seconds["touch"] * 1e3
        table.add_row(what, f"{active:.2f} ms, touch {touch:.2f} ms")
    finish(args, "sharing", result, table)


if __name__ == "__main__":
    main()
