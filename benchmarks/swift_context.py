"""Longest context beside neighbours that lend: SwiftCache's statements of section 5.3.

Computed for devices with borrowed memory: V100-32G, A100-80G, H20-96G with the pages of a Qwen3-14B
and a Qwen3-8B beside them, L4 with those of two Qwen3-8B, as in the paper; every model alone on its
device, idle, in 16 bits. `alone`: weights, KV and the activations of a chunk of 8K or 32K tokens,
or of the whole prompt. `swiftcache`: equations 1 to 5, chunks of 8K; `slots2`: with two slots, as
here. Activations are counted, not measured: residual stream, and of a layer its attention or its
MLP.

And live on CPU, by budget: the longest prompt that one device accepts and answers under
`swiftcache` over that under `balloon` in chunks as long (KV beyond the device's is on the host,
layer by layer), in chunks four times as long, and in one.

- `ratio_8k`, `ratio_32k`: the least and the most of `swiftcache` over chunks of 8K (the paper:
  1.58 to 3.98), and over chunks of 32K and none (1.81 to 6.66).
- `live_ratio`: by budget.
- `beside`: every number of the text about contexts, and the same here; `roomy`: of models that
  leave at least half of their device to KV.
- `units`: blocks that a master and a worker exchange at least (equations 6 to 9), and the memory
  that is lost for it, against pages of 2 MiB.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

from ballast.bench.inprocess import InProcess
from ballast.core.errors import ConfigError
from ballast.core.event import FailedOutput
from ballast.core.request import Submission
from ballast.core.settings import DeviceSettings, FleetSettings, ModelSettings
from ballast.core.units import KiB, MiB
from ballast.kv.stream_caches import layer_block_bytes, layer_blocks, remote_blocks, stream_caches
from ballast.policy.fleet.elastic_cache import block_elements, elastic_units
from ballast.sim.cluster import USABLE
from ballast.sim.model_catalogue import ModelFacts, facts
from ballast.sim.profile import device_profile
from benchmarks.common import finish, options
from benchmarks.exactness import make_llama

BLOCK = 16
CHUNK_8K, CHUNK_32K = 8192, 32768
WORKERS = {
    "L4": ("Qwen3-8b", "Qwen3-8b"),
    "V100-32G": ("Qwen3-14b", "Qwen3-8b"),
    "A100-80G": ("Qwen3-14b", "Qwen3-8b"),
    "H20-96G": ("Qwen3-14b", "Qwen3-8b"),
}
MASTERS = ("LWM-1M-7b", "Qwen3-8b", "Qwen3-14b", "Qwen3-32b")
"""The paper does not state which models are masters here."""
STATED = {
    "over chunks of 8K": (1.58, 3.98),
    "over chunks of 32K and none": (1.81, 6.66),
    "LWM without chunks, V100-32G": 18_000,
    "LWM without chunks, H20-96G": 160_000,
}
WORKED = ("Qwen3-8b", "Qwen3-14b", "Qwen3-32b")
PAGE = 2 * MiB
LIVE_PAGES = (32, 64)
"""Pages of KV on the live device."""
LIVE_CHUNK = 64
LIVE_ROWS = {
    "8K": ("balloon", LIVE_CHUNK),
    "32K": ("balloon", 4 * LIVE_CHUNK),
    "swiftcache": ("swiftcache", LIVE_CHUNK),
}
"""Preset and `step_tokens` of rows: chunks in the proportion of 8K to 32K. `none` is `balloon` in
chunks as long as each prompt."""


def activation_bytes(m: ModelFacts) -> int:
    """Bytes of activations of a token: the residual stream twice, and the larger of attention
    (queries, keys, values, result) and MLP (gate, up, product)."""
    attention = (2 * m.heads + 2 * m.kv_heads) * m.head_dim
    return 2 * (2 * m.hidden + max(attention, 3 * m.intermediate))


@dataclass(frozen=True)
class Longest:
    """Tokens of the longest context."""

    chunk_8k: int
    chunk_32k: int
    whole: int
    swiftcache: int
    slots2: int

    def over(self, tokens: int) -> float | None:
        return self.swiftcache / tokens if tokens else None


def kv_memory(device: str, m: ModelFacts, chunk: int) -> int:
    """Bytes of KV memory of a device that serves one model in chunks; 0: it does not fit."""
    hardware = device_profile(device).hardware
    assert hardware is not None
    left = USABLE * hardware.memory_bytes - 2 * m.parameters - chunk * activation_bytes(m)
    return max(0, int(left))


def longest(device: str, master: ModelFacts, workers: Sequence[ModelFacts]) -> Longest:
    """Longest contexts of a model on a device, alone and with the memory of idle neighbours."""
    per_token = layer_block_bytes(1, master.kv_heads, master.head_dim, 2) * master.layers
    alone = [kv_memory(device, master, c) // per_token for c in (CHUNK_8K, CHUNK_32K)]
    whole = kv_memory(device, master, 0) // (per_token + activation_bytes(master))
    layer = layer_block_bytes(BLOCK, master.kv_heads, master.head_dim, 2)
    own = layer_blocks(kv_memory(device, master, CHUNK_8K), layer)
    lent = [remote_blocks(kv_memory(device, w, CHUNK_8K), layer, master.layers) for w in workers]
    one, two = (stream_caches(own, lent, master.layers, slots).longest for slots in (1, 2))
    # A chunk that is longer than the prompt takes no more than the prompt.
    short = [
        max(n, whole if n < c else 0) for n, c in zip(alone, (CHUNK_8K, CHUNK_32K), strict=True)
    ]
    return Longest(short[0], short[1], whole, one * BLOCK, two * BLOCK)


def computed() -> dict[str, dict[str, Longest]]:
    """Longest contexts by device and master, where the master fits."""
    found: dict[str, dict[str, Longest]] = {}
    for device, workers in WORKERS.items():
        lenders = [facts(name) for name in workers]
        rows = {name: longest(device, facts(name), lenders) for name in MASTERS}
        found[device] = {name: row for name, row in rows.items() if row.whole > 0}
    return found


def range_of(found: dict[str, dict[str, Longest]], *arms: str) -> tuple[float, float]:
    """The least and the most of SwiftCache's longest context over the arms'."""
    rows = [row for rows in found.values() for row in rows.values()]
    ratios = [r for row in rows for arm in arms if (r := row.over(getattr(row, arm))) is not None]
    return min(ratios), max(ratios)


def roomy(found: dict[str, dict[str, Longest]]) -> dict[str, dict[str, Longest]]:
    """The rows of models whose weights take at most half of their device."""

    def memory(device: str) -> float:
        hardware = device_profile(device).hardware
        assert hardware is not None
        return hardware.memory_bytes

    return {
        d: {n: row for n, row in rows.items() if 4 * facts(n).parameters <= memory(d)}
        for d, rows in found.items()
    }


def beside(found: dict[str, dict[str, Longest]]) -> list[tuple[str, Any, Any]]:
    """(what, what the text states, the same here)."""
    spare = roomy(found)
    arms = {
        "over chunks of 8K": ("chunk_8k",),
        "over chunks of 32K and none": ("chunk_32k", "whole"),
    }
    rows: list[tuple[str, Any, Any]] = []
    for what, names in arms.items():
        rows.append((what, STATED[what], range_of(found, *names)))
        rows.append((f"{what}, roomy", STATED[what], range_of(spare, *names)))
    for device in ("V100-32G", "H20-96G"):
        what = f"LWM without chunks, {device}"
        rows.append((what, STATED[what], found[device]["LWM-1M-7b"].whole))
    return rows


def contradiction() -> list[float]:
    """MiB of memory beside the weights for each token of the longest unchunked contexts that the
    paper states of one model: they differ by more than any activations would explain."""
    m = facts("LWM-1M-7b")
    stated = {"V100-32G": 18_000, "H20-96G": 160_000}
    return [
        (device_profile(d).hardware.memory_bytes - 2 * m.parameters) / n / MiB  # type: ignore[union-attr]
        for d, n in stated.items()
    ]


def live(pages: int, scratch: Path) -> dict[str, int]:
    """The longest prompt that a device serves, by row; with a chunk of 64 tokens its budget leaves
    so many pages to KV, and fewer with longer ones, whose activations take more."""
    path = make_llama(scratch / f"m{pages}", 0, num_hidden_layers=16, max_position_embeddings=65536)
    device = DeviceSettings(budget_bytes=64 * MiB, page_bytes=64 * KiB, step_tokens=LIVE_CHUNK)
    model = ModelSettings(name="m", path=str(path), dtype="float32")
    fleet = FleetSettings(models=(model,), device=device)
    with InProcess(fleet) as server:
        state = server.device.state
        least = state.arena.pages + state.models["m"].weights.pages
    budget = (least + pages) * device.page_bytes

    def row(preset: str, step_tokens: int) -> FleetSettings:
        own = replace(device, budget_bytes=budget, step_tokens=step_tokens)
        return replace(fleet, device=own, preset=preset)

    found = {}
    for name, (preset, chunk) in LIVE_ROWS.items():
        with InProcess(row(preset, chunk)) as server:
            found[name] = _longest(partial(_served, server))
    found["none"] = _longest(lambda n: _served_whole(row("balloon", n), n))
    return found


def _longest(serves: Callable[[int], bool]) -> int:
    """Bisect the longest prompt; what is refused costs nothing, and what is accepted is served."""
    low, high = 0, 16
    while high <= 1 << 15 and serves(high):
        low, high = high, 2 * high
    while high - low > 16:
        middle = (low + high) // 2
        low, high = (middle, high) if serves(middle) else (low, middle)
    return low


def _served_whole(fleet: FleetSettings, tokens: int) -> bool:
    """Whether a device whose steps have as many tokens serves a prompt in one step."""
    try:
        with InProcess(fleet) as server:
            return _served(server, tokens)
    except ConfigError:
        return False  # its activations do not fit


def _served(server: InProcess, tokens: int) -> bool:
    prompt = tuple(1 + (7 * i + tokens) % 90 for i in range(tokens))
    answer = server.generate([Submission(id=f"r{tokens}", model="m", prompt=prompt, max_tokens=1)])
    end = answer[f"r{tokens}"].end
    return not isinstance(end, FailedOutput)


def units(master: ModelFacts, worker: ModelFacts) -> dict[str, float]:
    """The least exchange of two models (equations 6 to 9), and bytes lost by it and by pages.

    A need that is as likely to be any number of blocks is rounded up to units, and what is spare is
    rounded down: half a unit less half a block is lost each time. With pages that is half a page,
    and what blocks leave of each page.
    """
    elements = [block_elements(m.layers, BLOCK, m.kv_heads, m.head_dim) for m in (master, worker)]
    found = elastic_units(*elements)
    unit = found.master * elements[0] * 4
    return {
        "master": found.master,
        "worker": found.worker,
        "unit_bytes": unit,
        "lost_by_units": (unit - 4 * elements[0]) / 2 + (unit - 4 * elements[1]) / 2,
        "lost_by_pages": PAGE,
        "left_of_pages": page_rest(master),
    }


def page_rest(m: ModelFacts) -> float:
    """Part of a page that blocks of 4 to 16 tokens leave, of the best size."""
    token = m.spec(max_model_len=4096).kv_bytes_per_token
    return min(PAGE % (n * token) for n in range(BLOCK // 4, BLOCK + 1) if n * token <= PAGE) / PAGE


def main() -> None:
    args = options(__doc__)
    found = computed()
    result: dict[str, Any] = {
        "computed": {d: {n: vars_of(row) for n, row in rows.items()} for d, rows in found.items()},
        "ratio_8k": range_of(found, "chunk_8k"),
        "ratio_32k": range_of(found, "chunk_32k", "whole"),
        "stated": STATED,
        "beside": beside(found),
        "mib_per_token_stated": contradiction(),
        "units": {
            m: {w: units(facts(m), facts(w)) for w in WORKED if w != m}
            for m in ("LWM-1M-7b", "Qwen3-32b", "Qwen3-14b")
        },
    }
    with tempfile.TemporaryDirectory() as scratch:
        budgets = LIVE_PAGES[:1] if args.quick else LIVE_PAGES
        result["live"] = {str(pages): live(pages, Path(scratch)) for pages in budgets}
    result["live_ratio"] = {
        pages: row["swiftcache"] / row["8K"] for pages, row in result["live"].items()
    }
    finish(args, "swift_context", result, drawn(result))


def vars_of(row: Longest) -> dict[str, int]:
    return {name: getattr(row, name) for name in row.__dataclass_fields__}


def drawn(result: dict[str, Any]) -> Table:
    table = Table("device", "model", "8K", "32K", "none", "SwiftCache", "over 8K", title="tokens")
    for device, rows in result["computed"].items():
        for name, row in rows.items():
            cells = (row[c] for c in ("chunk_8k", "chunk_32k", "whole", "swiftcache"))
            ratio = f"{row['swiftcache'] / row['chunk_8k']:.2f}"
            table.add_row(device, name, *(f"{n:,}" for n in cells), ratio)
    for pages, row in result["live"].items():
        cells = (row[c] for c in ("8K", "32K", "none", "swiftcache"))
        ratio = f"{row['swiftcache'] / row['8K']:.2f}"
        table.add_row("CPU", f"{pages} pages", *(f"{n:,}" for n in cells), ratio)
    table.caption = "\n".join(
        f"{what}: the text {_shown(text)}, here {_shown(here)}"
        for what, text, here in result["beside"]
    )
    return table


def _shown(value: tuple[float, float] | int) -> str:
    if isinstance(value, int):
        return f"{value:,} tokens"
    return f"{value[0]:.2f} to {value[1]:.2f}"


if __name__ == "__main__":
    main()
