"""Why chunks and the knob of C2CServe bring what they bring, pass by pass (part of `c2c_sim`).

A prompt alone on one of seven slices of a GH200, all weights in host memory: seconds of its passes
by what bounds them, by size of chunk, with the link to itself and with a seventh of it.
"""

from __future__ import annotations

from typing import Any

from ballast.core.gemm_traffic import GemmShape, hybrid
from ballast.core.job import JobLoad, chunk_pairs
from ballast.core.model import ModelSpec
from ballast.core.pass_traffic import OS_TILE, TOGETHER, WS_TILE, PassSizes, pass_traffic
from ballast.sim.cluster import Kind

PROMPT = 1536
CHUNKS = (128, 256, 512, 1536)
FIGURE_4 = GemmShape(m=5120, n=8192, k=8192)
"""The paper states the traffic, not the GEMM: this one fits."""
COLUMNS = ("compute", "memory", "link", "knob_0", "knob_1")
SHARES = tuple(k / 20 for k in range(21))
"""Values of `os_share` among which the best is looked for."""


def bounds(kind: Kind, spec: ModelSpec, part: float) -> list[dict[str, Any]]:
    """By chunk, seconds of the prompt by each bound: `compute`; `memory` with the knob at 0; `link`
    with the knob at 0 and `part` of the link; `knob_0`, `knob_1` and `best`, of whole passes.
    `kind` is whole, or has equal slices."""
    machine = kind.largest.of([spec]).in_place
    assert machine is not None
    link = kind.link.to_device * part
    sizes, work = PassSizes.of(spec), machine.without_reading(spec)
    rows = []
    for chunk in CHUNKS:
        n = PROMPT // chunk
        loads = [JobLoad(chunk, 1, chunk_pairs(chunk, i * chunk), 0, 0) for i in range(n)]
        compute = [work.of(load) for load in loads]
        traffic = {s: pass_traffic(sizes, chunk, 1, s, machine.multiprocessors) for s in SHARES}
        passes = {
            s: sum(max(c, t.seconds(link, machine.memory_bandwidth)) for c in compute)
            for s, t in traffic.items()
        }
        best = min(passes, key=lambda s: (passes[s], s))
        rows.append(
            {
                "chunk": chunk,
                "compute": sum(compute),
                "memory": n * traffic[0.0].memory_seconds(machine.memory_bandwidth),
                "link": n * traffic[0.0].link / link,
                "knob_0": passes[0.0],
                "knob_1": passes[1.0],
                "best": passes[best],
                "best_share": best,
            }
        )
    return rows


def rows_of(found: dict[str, list[dict[str, Any]]]) -> list[list[str]]:
    """Rows of a table, by model and part of the link."""
    return [
        [f"{name}, chunks of {row['chunk']}"]
        + [f"{row[key]:.2f}" for key in COLUMNS]
        + [f"{row['best']:.2f} at {row['best_share']:.2f}"]
        for name, of in found.items()
        for row in of
    ]


def figure_4b() -> dict[str, list[float]]:
    """Gigabytes over the link and in device memory, output- and weight-stationary."""
    both = [hybrid(FIGURE_4, OS_TILE, WS_TILE, share, 132, TOGETHER) for share in (1.0, 0.0)]
    return {"link": [t.link / 1e9 for t in both], "device": [t.device / 1e9 for t in both]}


def figure_4a(kinds: dict[str, Kind]) -> dict[str, list[float]]:
    """Milliseconds of figure 4's GEMM on each kind, output- and weight-stationary, the link to
    itself."""
    found = {}
    for name, kind in kinds.items():
        unit = kind.largest
        machine = unit.of(()).in_place
        assert machine is not None
        hardware = kind.profile.hardware
        assert hardware is not None
        flops = hardware.flops * (machine.multiprocessors / hardware.multiprocessors)
        times = (
            hybrid(FIGURE_4, OS_TILE, WS_TILE, share, machine.multiprocessors, TOGETHER).seconds(
                kind.link.to_device, machine.memory_bandwidth
            )
            for share in (1.0, 0.0)
        )
        found[name] = [1e3 * max(seconds, FIGURE_4.flops / flops) for seconds in times]
    return found


def share_of_prompts(spec: ModelSpec, prompt: int, output: int, chunk: int) -> float:
    """Part of the bytes that a request reads over the link which its prompt reads, alone, with the
    knob at 0."""
    sizes = PassSizes.of(spec)
    once = pass_traffic(sizes, chunk, 1, 0.0, 16).link
    step = pass_traffic(sizes, 1, 1, 0.0, 16).link
    passes = -(-prompt // chunk)
    return passes * once / (passes * once + (output - 1) * step)
