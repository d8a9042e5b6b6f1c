"""Run every benchmark once, one after another, on one commit: what `docs/benchmarks.md` quotes.

Nothing else should run on the machine meanwhile; all of it takes about six and a half hours.

    python -m benchmarks.everything --out out/benchmarks
    python -m benchmarks.everything --out out/benchmarks --only fleet,robustness
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common import machine, write_json

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Run:
    """One benchmark with its options."""

    name: str
    options: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        """As docs name it."""
        return " ".join((self.name, *self.options))

    @property
    def file_name(self) -> str:
        return "-".join((self.name, *(o.strip("-") for o in self.options)))


RUNS = (
    Run("exactness"),
    Run("architectures"),
    Run("tp_exactness"),
    Run("sim_determinism"),
    Run("sim_links"),
    Run("pool"),
    Run("switch"),
    Run("elastic_overhead", ("--quick",)),
    Run("lending"),
    Run("join"),
    Run("single_model"),
    Run("moe"),
    Run("attention"),
    Run("http_overhead"),
    Run("light_load"),
    Run("lanes"),
    Run("fleet"),
    Run("devices"),
    Run("mirage_live"),
    Run("mirage_sim", ("--sweeps",)),
    Run("overload_presets"),
    Run("mux_sim", ("--quick",)),
    Run("mux_estimator"),
    Run("mux_cluster", ("--seconds", "60", "--rates", "1,2,4,8", "--alphas", "0.9,2.1")),
    Run("mux_ablations", ("--seconds", "40")),
    Run("mux_live"),
    Run("placement"),
    Run("prism_sim"),
    Run("prism_roles"),
    Run("activation"),
    Run("migration"),
    Run("prism_live", ("--rounds", "2")),
    Run("prism_faults", ("--kills", "40")),
    Run("prices", ("--quick",)),
    Run("policy_cost"),
    Run("seam", ("--quick",)),
    Run("sim_fidelity"),
    Run("sim_engines"),
    Run("sim_profiles"),
    Run("sim_costs"),
    Run("sim_speed"),
    Run("crash"),
    Run("overload"),
    Run("robustness"),
)
"""What needs nothing beside the project and its traces; peers and GPUs are others' machines."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of results and output")
    parser.add_argument("--only", default="", help="names, separated by commas")
    args = parser.parse_args()
    names = {name for name in args.only.split(",") if name}
    if unknown := names - {run.name for run in RUNS}:
        parser.error(f"no benchmark {', '.join(sorted(unknown))}")
    console = Console()
    args.out.mkdir(parents=True, exist_ok=True)
    done: dict[str, Any] = {}
    for run in RUNS:
        if names and run.name not in names:
            continue
        console.print(f"{time.strftime('%H:%M')} {run.command}", highlight=False)
        began = time.monotonic()
        with (args.out / f"{run.file_name}.txt").open("w", encoding="utf-8") as output:
            target = str((args.out / f"{run.file_name}.json").resolve())
            status = subprocess.run(
                (sys.executable, "-m", f"benchmarks.{run.name}", *run.options, "--json", target),
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
            ).returncode
        seconds = time.monotonic() - began
        console.print(f"      {seconds:.0f} s, exit status {status}", highlight=False)
        done[run.command] = {"commit": commit(), "seconds": round(seconds), "status": status}
        write_json(args.out / "everything.json", {"machine": machine(), "runs": done})
    sys.exit(any(entry["status"] for entry in done.values()))


def commit() -> str:
    """The commit that is checked out, and whether files differ from it."""
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
