"""Whether models that come in should share the link, or come one after the other.

In virtual time, on the fleet and the machine's costs of `benchmarks.fleet`: what fair sharing among
activations does to the time to first token, against one stream of them, over paired seeds.
Then what a stream of its own is worth to one layer that is fetched while a whole model comes in.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from ballast.bench.run_options import workload_of
from ballast.core.clock import VirtualClock
from ballast.core.event import TransferDoneEvent
from ballast.core.link import Direction
from ballast.memory.copies import Copy
from ballast.memory.transfer import ACTIVATIONS
from ballast.sim.event_heap import EventHeap
from ballast.sim.link import LandingWatch, SimLink
from ballast.sim.model_catalogue import facts
from ballast.sim.profile import device_profile
from ballast.workload.workload import Workload
from benchmarks.common import finish, options
from benchmarks.setting import Setting, no_levels, prepare, trace_option

SEEDS = {"swap": 3, "balloon": 24}
"""Workloads per preset."""
SECONDS = 100.0
RATE, MOST_TOKENS = 2.0, 192
"""Requests per second, and their longest prompt and output together."""
BUDGET = 0.4
"""Of all weights and peak KV."""
SLOWDOWNS = (1, 4)
"""Of the link."""
ROTATION = ("GH200-96G", "Llama-2-13b")


class Apart(SimLink):
    """Every transfer is a stream of its own: all share."""

    def start(
        self,
        transfer_id: int,
        copies: Sequence[Copy],
        stream: str = ACTIVATIONS,
        direction: Direction = Direction.TO_DEVICE,
        watch: LandingWatch | None = None,
    ) -> None:
        super().start(transfer_id, copies, f"{stream}:{transfer_id}", direction, watch)


def ttfts(
    setting: Setting, preset: str, workload: Workload, slowdown: int, link: type[SimLink]
) -> list[float]:
    """Mean and P99, in seconds, over requests that had a token."""
    budget = int(BUDGET * (setting.weight_bytes + setting.peak_kv_bytes))
    pace = setting.roomy.link.bytes_per_second
    assert pace is not None
    with patch("ballast.sim.device.SimLink", link):
        fleet = setting.under(preset, budget, pace / slowdown)
        ran = setting.virtual(fleet, workload, no_levels(setting))
    outcome = [r.ttft for r in ran.report.records if r.ttft is not None]
    return [float(np.mean(outcome)), float(np.percentile(outcome, 99))]


def compared(setting: Setting, preset: str, seeds: int, slowdown: int) -> dict[str, float]:
    """Time to first token, sharing over one stream: geometric means of seeds and their errors."""
    ratios = []
    names = [spec.name for spec in setting.specs]
    for seed in range(1, seeds + 1):
        made = workload_of(
            "bursty", names, rate=RATE, seconds=SECONDS, most_tokens=MOST_TOKENS, seed=seed
        )
        apart, queued = (ttfts(setting, preset, made, slowdown, of) for of in (Apart, SimLink))
        ratios.append(np.log(np.array(apart) / np.array(queued)))
    mean, error = np.mean(ratios, axis=0), np.std(ratios, axis=0, ddof=1) / len(ratios) ** 0.5
    return {
        "mean": float(np.exp(mean[0])),
        "mean_error": float(error[0]),
        "p99": float(np.exp(mean[1])),
        "p99_error": float(error[1]),
        "mean_least": float(np.exp(np.min(ratios, axis=0)[0])),
        "mean_most": float(np.exp(np.max(ratios, axis=0)[0])),
    }


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
            if isinstance(event, TransferDoneEvent) and event.transfer_id == 1:
                return clock.now()


def main(argv: Sequence[str] | None = None) -> None:
    args = options(__doc__, argv, trace_option)
    with tempfile.TemporaryDirectory() as scratch:
        setting = prepare(Path(scratch), args.trace, SECONDS)
        shared = {
            f"{preset}, link {slowdown}x slower": compared(
                setting, preset, 2 if args.quick else seeds, slowdown
            )
            for preset, seeds in SEEDS.items()
            for slowdown in SLOWDOWNS
        }
    result: dict[str, Any] = {
        "ttft_shared_over_queued": shared,
        "layer": f"of {ROTATION[1]} on {ROTATION[0]}, while the model comes in",
        "layer_ms_in_its_own_stream": 1e3 * layer_seconds("rotation"),
        "layer_ms_in_the_same": 1e3 * layer_seconds(ACTIVATIONS),
    }
    finish(args, "link_streams", result)


if __name__ == "__main__":
    main()
