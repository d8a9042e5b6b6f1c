"""One workload, live and in virtual time, through the same loop and policies.

Each preset serves the same window of the trace on the same tight budget, live and simulated on a
profile of this machine measured right before that live run. Both stories (every event and action,
in order) are written; throughput and medians are put side by side. `median_error_max` is the
largest relative error of the simulation in throughput and in P50 of TTFT, TPOT and end-to-end time.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ballast.bench.device_run import DeviceRun
from ballast.bench.report import Report
from ballast.engine.story_file import StoryFile
from ballast.policy.presets import PRESETS
from benchmarks.common import finish, options, verdict
from benchmarks.contenders import defaults
from benchmarks.setting import (
    no_levels,
    prepare,
    trace_option,
)

COMPARED = defaults(*PRESETS)
GOAL = 0.15
BUDGET = 0.4
"""Of all weights and peak KV."""
RATE = 0.6
"""Of the trace's."""


def extra(parser: argparse.ArgumentParser) -> None:
    trace_option(parser)
    parser.add_argument(
        "--stories", type=Path, default=Path("out/seam"), help="where the stories are written"
    )


def medians(report: Report) -> dict[str, float]:
    """What the two worlds are compared by, in seconds and tokens per second."""
    total = report.total
    assert total.ttft is not None
    assert total.tpot is not None
    assert total.e2e is not None
    return {
        "output_tokens_per_second": report.output_tokens_per_second,
        "ttft_p50": total.ttft.p50,
        "tpot_p50": total.tpot.p50,
        "e2e_p50": total.e2e.p50,
    }


def write_story(directory: Path, name: str, ran: DeviceRun) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.jsonl"
    path.unlink(missing_ok=True)
    file = StoryFile(path, "cpu:0")
    file.write(ran.story)
    file.close()


def main() -> None:
    args = options(__doc__, extra=extra)
    seconds = 45.0 if args.quick else 150.0
    result: dict[str, Any] = {"presets": {}}
    worst = 0.0
    table = Table("preset", "", "live", "virtual", "error", title="seam")
    with tempfile.TemporaryDirectory() as scratch:
        setting = prepare(Path(scratch), args.trace, seconds)
        workload = setting.workload.scale_rate(RATE)
        slos = no_levels(setting)
        budget = int(BUDGET * (setting.weight_bytes + setting.peak_kv_bytes))
        Console().print(f"{len(workload.requests)} requests: {workload.describe()}")
        for preset in COMPARED.rows:
            fleet = setting.under(preset, budget)
            setting = setting.profiled()
            live = setting.live(fleet, workload, slos)
            virtual = setting.virtual(fleet, workload, slos)
            write_story(args.stories, f"{preset}-live", live)
            write_story(args.stories, f"{preset}-virtual", virtual)
            a, b = medians(live.report), medians(virtual.report)
            errors = {key: abs(b[key] / a[key] - 1) for key in a}
            worst = max(worst, *errors.values())
            for key in a:
                table.add_row(preset, key, f"{a[key]:.4g}", f"{b[key]:.4g}", f"{errors[key]:.1%}")
            for key in live.counts:
                table.add_row(preset, key, str(live.counts[key]), str(virtual.counts[key]), "")
            result["presets"][preset] = {
                "live": {**a, **live.counts, "failed": live.report.total.failed},
                "virtual": {**b, **virtual.counts, "failed": virtual.report.total.failed},
                "errors": errors,
            }
    result |= {
        "workload": workload.describe(),
        "budget_bytes": budget,
        "median_error_max": worst,
        "median_error_goal": GOAL,
        "median_error": verdict(worst, at_most=GOAL),
    }
    table.add_row("", "median_error_max", "", "", f"{worst:.1%}")
    finish(args, "seam", result, table)


if __name__ == "__main__":
    main()
