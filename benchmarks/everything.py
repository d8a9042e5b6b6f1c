"""Run every benchmark once, one after another, on one commit: what `docs/benchmarks.md` quotes.

Nothing else should run on the machine meanwhile; all of it takes about seven hours. What has ended
on the same code (`run_code` says which code a benchmark depends on) is not run again, so that
several calls make one run. A benchmark that is stopped on its way begins anew, but for the longest,
which resume. Results lie in `docs/results`, to be committed, with a record of when, where and on
what code each was taken.

    python -m benchmarks.everything
    python -m benchmarks.everything --minutes 90
    python -m benchmarks.everything --only fleet,robustness --again
    python -m benchmarks.everything --untimed
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common import machine, write_json
from benchmarks.run_code import code_hash

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"


@dataclass(frozen=True)
class Run:
    """One benchmark with its options."""

    name: str
    options: tuple[str, ...] = ()
    timed: bool = True
    """Whether a figure depends on how fast this machine is: nothing else may run beside it."""
    resumes: bool = False
    """Whether it takes `--keep PATH`, where a stopped run left its measurements."""

    @property
    def command(self) -> str:
        """As docs name it."""
        return " ".join((self.name, *self.options))

    @property
    def file_name(self) -> str:
        """Of its result, without suffix."""
        return "-".join((self.name, *(o.strip("-") for o in self.options)))


RUNS = (
    Run("exactness", timed=False),
    Run("architectures", timed=False),
    Run("swift_exact", timed=False),
    Run("tp_exactness"),
    Run("sim_determinism", timed=False),
    Run("sim_links"),
    Run("pool"),
    Run("switch"),
    Run("elastic_overhead"),
    Run("lending"),
    Run("resize"),
    Run("join"),
    Run("single_model"),
    Run("quantised"),
    Run("quantised_crowd", timed=False),
    Run("moe"),
    Run("attention"),
    Run("http_overhead"),
    Run("light_load"),
    Run("start"),
    Run("lanes"),
    Run("fleet"),
    Run("devices"),
    Run("mirage_live"),
    Run("mirage_sim", ("--sweeps",), timed=False, resumes=True),
    Run("overload_presets", timed=False),
    Run("mux_sim", ("--quick", "--seconds", "120"), timed=False),
    Run("mux_estimator", timed=False),
    Run(
        "mux_cluster", ("--seconds", "60", "--rates", "1,2,4,8", "--alphas", "0.9,2.1"), timed=False
    ),
    Run("mux_ablations", ("--seconds", "40"), timed=False),
    Run("mux_live"),
    Run("c2c_sim", ("--quick",), timed=False),
    Run("swift_sim", ("--quick",), timed=False),
    Run("swift_context", timed=False),
    Run("placement"),
    Run("prism_sim", timed=False),
    Run("prism_roles", timed=False),
    Run("activation"),
    Run("migration"),
    Run("prism_live", ("--rounds", "2")),
    Run("prism_faults", ("--kills", "40")),
    Run("c2c_live"),
    Run("swift_live", ("--quick",)),
    Run("prices", ("--quick",), timed=False),
    Run("policy_cost"),
    Run("seam", ("--quick",)),
    Run("sim_http"),
    Run("sim_fidelity", ("--parts", "one"), resumes=True),
    Run("sim_fidelity", ("--parts", "two"), resumes=True),
    Run("sim_engines", timed=False),
    Run("sim_profiles", timed=False),
    Run("sim_published", timed=False),
    Run("sim_costs", timed=False),
    Run("sim_speed"),
    Run("crash"),
    Run("kept"),
    Run("fleet_faults"),
    Run("overload"),
    Run("robustness"),
)
"""What needs nothing beside the project and its traces; peers and GPUs are others' machines."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of results and output")
    parser.add_argument("--only", default="", help="names of benchmarks or results, by commas")
    parser.add_argument("--again", action="store_true", help="also what has ended on this code")
    parser.add_argument(
        "--untimed", action="store_true", help="only what may run beside other work: times nothing"
    )
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="start none after so many"
    )
    args = parser.parse_args()
    names = {name for name in args.only.split(",") if name}
    if unknown := names - {name for run in RUNS for name in (run.name, run.file_name)}:
        parser.error(f"no benchmark {', '.join(sorted(unknown))}")
    console = Console()
    args.out.mkdir(parents=True, exist_ok=True)
    record = args.out / "everything.json"
    done = ended_runs(record)
    code = {run.command: code_hash(run.name, ROOT) for run in RUNS}
    end = time.monotonic() + 60 * args.minutes
    for run in RUNS:
        if (names and names.isdisjoint((run.name, run.file_name))) or (args.untimed and run.timed):
            continue
        before = done.get(run.command)
        if before is not None and before["code"] == code[run.command] and not args.again:
            console.print(f"      {run.command}: ended on this code", highlight=False)
            continue
        if time.monotonic() >= end:
            console.print(f"      {run.command}: no time left", highlight=False)
            continue
        console.print(f"{time.strftime('%H:%M')} {run.command}", highlight=False)
        began = time.monotonic()
        kept = args.out / "kept" / f"{run.file_name}-{code[run.command]}"
        if run.resumes:
            for of_other_code in set(kept.parent.glob(f"{run.file_name}-*")) - {kept}:
                shutil.rmtree(of_other_code)
            kept.mkdir(parents=True, exist_ok=True)
        status = perform(run, args.out, kept / "measured" if run.resumes else None)
        if run.resumes and not status:
            shutil.rmtree(kept)
        seconds = time.monotonic() - began
        console.print(f"      {seconds:.0f} s, exit status {status}", highlight=False)
        done = ended_runs(record)  # another call may run beside this one
        done[run.command] = {
            "commit": git("describe", "--always", "--dirty"),
            "code": code[run.command],
            "taken": time.strftime("%Y-%m-%d"),
            "machine": machine(),
            "seconds": round(seconds),
            "status": status,
        }
        write_json(record, {"runs": done})
    missing = [
        run.command for run in RUNS if done.get(run.command, {}).get("code") != code[run.command]
    ]
    console.print(f"not yet on this code: {', '.join(missing) or 'none'}", highlight=False)
    sys.exit(any(entry["status"] for entry in done.values()))


def perform(run: Run, out: Path, keep: Path | None) -> int:
    """Run a benchmark, its output and result in files of `out`; returns its exit status.

    `keep`: where it leaves its measurements, and goes on from those that are there; None: it cannot
    resume.
    """
    options = [*run.options, "--json", str((out / f"{run.file_name}.json").resolve())]
    if keep is not None:
        options += ["--keep", str(keep.resolve())]
    with (out / f"{run.file_name}.txt").open("w", encoding="utf-8") as output:
        return subprocess.run(
            (sys.executable, "-m", f"benchmarks.{run.name}", *options),
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        ).returncode


def ended_runs(record: Path) -> dict[str, Any]:
    """What earlier calls have recorded, by command."""
    if not record.is_file():
        return {}
    runs: dict[str, Any] = json.loads(record.read_text(encoding="utf-8"))["runs"]
    return runs


def git(*arguments: str) -> str:
    """Output of a git command in this repository; empty if it fails."""
    found = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return found.stdout.strip() if not found.returncode else ""


if __name__ == "__main__":
    main()
