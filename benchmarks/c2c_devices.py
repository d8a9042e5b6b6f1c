"""C2CServe's superchips by their public figures: what reading over the link costs on each of them,
and what a start from disk adds (part of `c2c_sim`).

GH200 and GB200 have profiles. Rubin has none: it is GB200's with the figures that NVIDIA states for
it, so that its kernels are assumed to reach the same parts of its peaks.
"""

from __future__ import annotations

from dataclasses import replace

from ballast.core.model import ModelSpec
from ballast.sim.cluster import Kind, parse_kinds

RUBIN = {"memory_bytes": 288e9, "memory_bandwidth": 22e12, "link": 0.9e12}
"""Of one GPU, the link one way. NVIDIA, Vera Rubin NVL72: 288 GB of HBM4 at 22 TB/s per GPU,
NVLink-C2C at 1.8 TB/s both ways together, per Vera, which feeds two GPUs."""
DISK = 6.9e9
"""Bytes per second of one NVMe disk over PCIe 4 x4, an assumption: the paper names no disk."""


def superchips() -> dict[str, Kind]:
    """One whole GPU of each, with the link to itself, by name."""
    (gh200,), (gb200,) = parse_kinds("GH200-96G"), parse_kinds("GB200")
    return {"GH200": gh200, "GB200": gb200, "Rubin (projected)": _rubin(gb200)}


def _rubin(gb200: Kind) -> Kind:
    profile = gb200.profile
    assert profile.hardware is not None
    faster = RUBIN["link"] / profile.hardware.host_bandwidth
    hardware = profile.hardware.model_copy(
        update={
            "memory_bytes": int(RUBIN["memory_bytes"]),
            "memory_bandwidth": RUBIN["memory_bandwidth"],
            "host_bandwidth": RUBIN["link"],
        }
    )
    rates = ("to_device", "to_host", "to_device_mixed", "to_host_mixed")
    link = profile.link.model_copy(
        update={rate: faster * getattr(profile.link, rate) for rate in rates}
    )
    changed = {"device": "Rubin", "hardware": hardware, "link": link}
    return replace(gb200, profile=profile.model_copy(update=changed))


def reading(kind: Kind, spec: ModelSpec) -> dict[str, float]:
    """Seconds of a decode step of one sequence, and of a prompt of 2,048 tokens: with weights in
    device memory, and in host memory with the knob at 0."""
    machine = kind.of([spec])
    resident = machine.lane_costs[spec.name]
    in_place = machine.reading_in_place([spec])[spec.name]
    return {
        "tpot_resident": resident.decoding(1)(0),
        "tpot_in_place": in_place.decoding(1)(0),
        "prefill_resident": resident.prefill_seconds(2048),
        "prefill_in_place": in_place.prefill_seconds(2048),
    }


def cold_start(spec: ModelSpec, warm: float) -> float:
    """Seconds from a request to the first token of a model that is on disk alone: its bytes are
    read, then it is switched to, which takes `warm`. Starts of engines are left out."""
    return sum(spec.segment_bytes) / DISK + warm
