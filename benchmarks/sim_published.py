"""Runs of vLLM on H100s that others measured and published, beside the simulator.

Lengths, rates and arrivals are those of the runs (`benchmarks.published_runs`); costs are those of
`graphs` on H100s, of which `answer_seconds` alone is fitted to these runs: `left_out` has it from
the runs of other models. Errors are simulated / measured - 1, in per cent, of the mean time to
first token and time per further token. Nothing depends on the machine.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from dataclasses import replace

import numpy as np

from ballast.core.event import Output, TokenOutput
from ballast.core.request import Submission
from ballast.core.settings import FleetSettings
from ballast.sim.cluster import SERVED, USABLE, Kind
from ballast.sim.profile import DeviceProfile, device_profile
from ballast.sim.simulate import simulate
from benchmarks.common import finish, options
from benchmarks.published_runs import DEVICE, PROMPTS, RUNS, SYSTEM_PROMPT, PublishedRun

SECONDS, WARM_UP, LOADED = 60.0, 20.0, 20.0
"""Of arrivals; of these, at the begin, not counted; and before them, for the weights to come."""
QUICK = (0, 4, 7)
"""Runs of a quick run: one of each group size."""


def served(run: PublishedRun, profile: DeviceProfile) -> tuple[float, float]:
    """Simulate a run; returns the mean seconds to the first token and per further token."""
    spec = replace(run.sizes.spec(max_model_len=2048), max_running=256)
    assert profile.hardware is not None
    page = SERVED.page_bytes * run.tp
    pages = int(USABLE * profile.hardware.memory_bytes) // SERVED.page_bytes
    device = replace(SERVED, name="d", page_bytes=page, budget_bytes=pages * page)
    fleet = FleetSettings(models=(), device=device, preset="static")
    arrivals = [_asked(run, n) for n in range(int(SECONDS * run.rate))]
    bring = replace(arrivals[0], id="bring", arrival=0.0, max_tokens=1)
    first: dict[str, float] = {}
    last: dict[str, float] = {}

    def receive(now: float, output: Output) -> None:
        if isinstance(output, TokenOutput):
            first.setdefault(output.request_id, now)
            last[output.request_id] = now

    machine = Kind(1, profile, ranks=run.tp).of([spec])
    simulate(fleet, [spec], [bring, *arrivals], machine, receive)
    counted = [r for r in arrivals if r.arrival >= LOADED + WARM_UP]
    ttft = np.mean([first[r.id] - r.arrival for r in counted])
    rest = np.mean([last[r.id] - first[r.id] for r in counted])
    return float(ttft), float(rest) / (run.output - 1)


def _asked(run: PublishedRun, n: int) -> Submission:
    """The n-th request; there are PROMPTS prompts, in turns, which begin alike in groups."""
    which = n % PROMPTS
    common = tuple((97 * (which % 9) + k) % 1000 for k in range(SYSTEM_PROMPT))
    own = tuple((7919 * which + 31 * k) % 1000 for k in range(run.prompt - SYSTEM_PROMPT))
    return Submission(
        id=str(n),
        model=run.sizes.name,
        prompt=(*common, *own),
        max_tokens=run.output,
        ignore_eos=True,
        arrival=LOADED + n / run.rate,
    )


def main() -> None:
    args: argparse.Namespace = options(__doc__)
    profile = device_profile(DEVICE)
    answer = profile.serving.answer_seconds
    runs = [RUNS[n] for n in QUICK] if args.quick else list(RUNS)
    found = [(run, *served(run, profile)) for run in runs]
    lacking = {run: run.ttft - (ttft - answer) for run, ttft, _ in found}
    rows = {}
    by_size: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for run, ttft, tpot in found:
        others = [s for other, s in lacking.items() if other.model != run.model]
        left_out = ttft - answer + statistics.median(others)
        off = [100 * (ttft / run.ttft - 1), 100 * (left_out / run.ttft - 1)]
        off.append(100 * (tpot / run.tpot - 1))
        by_size[run.tp].append((off[0], off[2]))
        name = f"{run.model}/tp{run.tp} {run.workload} {run.rate:g}/s"
        rows[name] = dict(zip(("ttft_pct", "ttft_left_out_pct", "tpot_pct"), off, strict=True))
    result: dict[str, object] = {
        f"{key}_median_pct": statistics.median(abs(row[key + "_pct"]) for row in rows.values())
        for key in ("ttft", "ttft_left_out", "tpot")
    }
    result["lacking_median_s"] = statistics.median(lacking.values())
    result["by_group_size"] = {
        tp: {
            "runs": len(offs),
            "ttft_median_pct": statistics.median(a for a, _ in offs),
            "tpot_median_pct": statistics.median(b for _, b in offs),
            "ttft_worst_pct": max((a for a, _ in offs), key=abs),
            "tpot_worst_pct": max((b for _, b in offs), key=abs),
        }
        for tp, offs in by_size.items()
    }
    finish(args, "sim_published", {**result, "rows": rows})


if __name__ == "__main__":
    main()
