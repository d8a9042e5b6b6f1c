"""Whether models that come in should share the link, or come one after the other.

In virtual time, on the fleet and the machine's costs of `benchmarks.fleet`: what fair sharing among
activations does to the time to first token, against one stream of them. Then what a stream of its
own is worth to one layer that is fetched while a whole model comes in.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from ballast.bench.choose import workload_of
from ballast.core.clock import VirtualClock
from ballast.core.event import TransferDone
from ballast.core.link import Direction
from ballast.memory.copies import Copy
from ballast.memory.transfer import ACTIVATIONS
from ballast.sim.catalogue import facts
from ballast.sim.heap import EventHeap
from ballast.sim.link import SimLink
from ballast.sim.profile import device_profile
from ballast.workload.workload import Workload
from benchmarks.common import finish, options
from benchmarks.setting import Setting, no_levels, prepare, trace_option

PRESETS = ("swap", "balloon")
BUDGET = 0.4
"""Of all weights and peak KV."""
RATE, MOST_TOKENS = 2.0, 256
"""Requests per second of the generated workloads, and their longest prompt and output together."""
SEEDS = 4
ROTATION = ("GH200-96G", "Llama-2-13b")


class Apart(SimLink):
    """Every transfer is a stream of its own: all share."""

    def start(
        self,
        transfer_id: int,
        copies: Sequence[Copy],
        stream: str = ACTIVATIONS,
        direction: Direction = Direction.TO_DEVICE,
    ) -> None:
        super().start(transfer_id, copies, f"{stream}:{transfer_id}", direction)


def ttfts(setting: Setting, preset: str, workload: Workload, link: type[SimLink]) -> list[float]:
    """Seconds, of every request that had a token."""
    budget = int(BUDGET * (setting.weight_bytes + setting.peak_kv_bytes))
    with patch("ballast.sim.device.SimLink", link):
        ran = setting.virtual(setting.under(preset, budget), workload, no_levels(setting))
    return [r.ttft for r in ran.report.records if r.ttft is not None]


def compared(setting: Setting, preset: str, workload: Workload) -> dict[str, float]:
    """Of time to first token: sharing over one stream."""
    fair = np.array(ttfts(setting, preset, workload, Apart))
    queued = np.array(ttfts(setting, preset, workload, SimLink))
    ratios = {f"p{p}": float(np.percentile(fair, p) / np.percentile(queued, p)) for p in (50, 99)}
    return {"mean": float(fair.mean() / queued.mean()), **ratios}


def layer_seconds(stream: str) -> float:
    """Until one layer is there that was asked for when its whole model had begun to come in."""
    device, model = ROTATION
    spec = facts(model).spec(max_model_len=2048)
    clock = VirtualClock()
    heap = EventHeap(clock)
    link = SimLink(heap, clock, device_profile(device).link.rates)
    link.start(0, [Copy(0, 0, spec.weight_bytes)])
    link.start(1, [Copy(0, 0, spec.segment_bytes[1])], stream)
    while True:
        for event in heap.take(None):
            if isinstance(event, TransferDone) and event.transfer_id == 1:
                return clock.now()


def main(argv: Sequence[str] | None = None) -> None:
    args = options(__doc__, argv, trace_option)
    seconds = 60.0 if args.quick else 300.0
    seeds = range(1, 1 + (1 if args.quick else SEEDS))
    with tempfile.TemporaryDirectory() as scratch:
        setting = prepare(Path(scratch), args.trace, seconds)
        names = [spec.name for spec in setting.specs]
        workloads = {"trace": setting.workload}
        for seed in seeds:
            workloads[f"bursty, seed {seed}"] = workload_of(
                "bursty", names, rate=RATE, seconds=seconds, most_tokens=MOST_TOKENS, seed=seed
            )
        shared = {
            preset: {name: compared(setting, preset, w) for name, w in workloads.items()}
            for preset in PRESETS
        }
    result: dict[str, Any] = {
        "ttft_shared_over_queued": shared,
        "mean_ttft_shared_over_queued": {
            preset: statistics.mean(of["mean"] for of in told.values())
            for preset, told in shared.items()
        },
        "layer": f"of {ROTATION[1]} on {ROTATION[0]}, while the model comes in",
        "layer_ms_in_its_own_stream": 1e3 * layer_seconds("rotation"),
        "layer_ms_in_the_same": 1e3 * layer_seconds(ACTIVATIONS),
    }
    finish(args, "link_streams", result)


if __name__ == "__main__":
    main()
