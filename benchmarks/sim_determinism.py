"""Whether a simulation gives the same bytes every time: JSON, page and stories, in processes of
their own.

Twelve models of the catalogue in bursty groups: on devices of three kinds, each by itself; on a
host whose link a tensor-parallel group and two devices of two lanes share, one of which lends to
the other; and on a group and a device of four lanes, where models run in turn. On the last two,
jobs' times spread and devices drift. One seed runs in
this process, twice, and in others with several `PYTHONHASHSEED`; `identical` says whether all of
them wrote the same bytes, and that another seed wrote others.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from json import dumps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ballast.bench.page import page
from ballast.bench.simulation import simulate_presets, simulation_json
from ballast.bench.simulation_setup import SimulationSetup, WorkloadOptions
from ballast.core.link import LinkRates
from ballast.core.settings import (
    DeviceSettings,
    FleetSettings,
    LinkSettings,
    ModelSettings,
    Slo,
)
from ballast.core.units import MiB
from ballast.fleet.entry_directory import CATALOGUE
from ballast.sim.cluster import Kind, parse_kinds
from ballast.sim.cluster_files import NO_FILES, ClusterFiles, OperatorOrder
from ballast.sim.cost_switches import CostSwitches
from ballast.sim.topology import ClusterLinks, PeerLinks
from benchmarks.common import finish, options

KNOWN = ("Llama-2-7b", "Llama-2-13b", "Qwen3-4b", "Qwen2.5-7b", "Llama-3-8b", "Qwen3-30B-A3B")
MODELS = 12
DEVICES = "1xH100-80G,1xA100-80G,2xL4"
PRESETS = "static,swap,balloon"
RATE, SECONDS, MOST_TOKENS = 3.0, 60.0, 1024
PLACED = "both"
HASH_SEEDS = ("0", "1", "4242", "random")


MANY = "1xH100-80G:tp2,1xA100-80G"
MANY_LANES = 4
MANY_PRESETS = "balloon,static+deadline,swap+round-robin"
TOGETHER = "1xH100-80G:tp2,2xL4"
TOGETHER_PRESETS = "swap,balloon,mirage"
GIVEN = ClusterFiles(
    joints=ClusterLinks(per_host=4, host=LinkRates.even(3e10), peers=PeerLinks.PCIE),
    orders=(
        OperatorOrder(at=1.0, lender=1, borrower=2, lend=256 * MiB),
        OperatorOrder(at=5.0, lender=1, borrower=2, recall="all"),
    ),
)


def written(seed: int, seconds: float) -> str:
    """SHA-256 of what `ballast simulate` would write."""
    apart = _written(seed, seconds, parse_kinds(DEVICES), PRESETS, NO_FILES)
    uneven = CostSwitches(job_spread=0.2, drift=0.1, seed=seed)
    shared = parse_kinds(TOGETHER, lanes=2, modelled=uneven)
    together = _written(seed, seconds, shared, TOGETHER_PRESETS, GIVEN)
    lanes = parse_kinds(MANY, lanes=MANY_LANES, modelled=uneven)
    many = _written(seed, seconds, lanes, MANY_PRESETS, NO_FILES)
    return hashlib.sha256(apart + together + many).hexdigest()


def _written(
    seed: int, seconds: float, kinds: Sequence[Kind], presets: str, files: ClusterFiles
) -> bytes:
    models = [
        ModelSettings(name=f"m{i}", path=CATALOGUE + KNOWN[i % len(KNOWN)], slo=Slo(tpot=0.1))
        for i in range(MODELS)
    ]
    fleet = FleetSettings(
        models=tuple(models), device=DeviceSettings(budget_bytes=0), link=LinkSettings()
    )
    asked = SimulationSetup.of(
        fleet, presets, WorkloadOptions("bursty", RATE, seconds, MOST_TOKENS, seed)
    )
    with TemporaryDirectory() as scratch:
        story = Path(scratch) / "story"
        asking = (asked.specs, kinds, asked.workload, asked.presets, PLACED)
        runs = list(simulate_presets(fleet, *asking, story=story, files=files))
        stories = b"".join(file.read_bytes() for file in sorted(story.parent.iterdir()))
    outcome = dumps(simulation_json(kinds, asked.specs, asked.workload, runs))
    outcome += page("a page", [asked.described()], [run.report for run in runs], runs)
    return outcome.encode() + stories


def apart(seed: int, seconds: float, hash_seed: str) -> str:
    """The same in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.sim_determinism", "--one", str(seed), str(seconds)]
    done = subprocess.run(
        command,
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
    )
    return done.stdout.splitlines()[-1]


def main(argv: Sequence[str] | None = None) -> None:
    def extra(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)

    if argv is None and "--one" in sys.argv:
        seed, length = sys.argv[sys.argv.index("--one") + 1 :]
        print(written(int(seed), float(length)))
        return
    args = options(__doc__, argv, extra)
    seconds = SECONDS / (6 if args.quick else 1)
    digests = {"here": written(1, seconds), "here again": written(1, seconds)}
    for hash_seed in HASH_SEEDS:
        digests[f"PYTHONHASHSEED {hash_seed}"] = apart(1, seconds, hash_seed)
    other = written(2, seconds)
    same = set(digests.values())
    result: dict[str, Any] = {
        "identical": len(same) == 1 and other not in same,
        "runs": len(digests),
        "presets": PRESETS,
        "devices": DEVICES,
        "together": f"{TOGETHER_PRESETS} on {TOGETHER}",
        "lanes": f"{MANY_PRESETS} on {MANY} with {MANY_LANES} lanes each",
        "sha256": digests,
        "other_seed": other,
    }
    finish(args, "sim_determinism", result)


if __name__ == "__main__":
    main()
