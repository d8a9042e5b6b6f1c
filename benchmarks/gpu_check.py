"""What a GPU does with all of this: tests, exactness, and the figures of docs/gpu.md.

One GPU, 9 minutes, no network; FastAPI, pyzmq and msgspec are not needed. Weights are
random and made on the device. Each part is a process of its own with a limit of time, and what it
has found is written as soon as it is known. In this order; what time is too short for is listed as
not run:

- `machine`: GPU, driver, versions.
- `pool`: microseconds to map and to unmap a page that has memory, at 2 MiB: one by one, 64 at once,
  and while a kernel runs; the longest call of each, and whether any waits for the kernel.
- `exactness`: three small Llamas in a pool so small that they evict each other. Greedy tokens
  against `transformers` on the same GPU after the same tokens, in two rounds, the second by CUDA
  graphs; in float32 a difference counts where the reference's margin is 1e-4 or more; in bfloat16
  their part of all tokens, beside that which running the reference in a batch of two gives. Then in
  float32 by the generic path, on two lanes, while layers rotate, and while KV is swapped.
- `in_place`: the same Llamas with weights that kernels read in host memory: in float32 against
  `transformers` while segments change places, in bfloat16 on an invariant device against weights on
  the GPU, for several shares of HybridGEMM. Tokens that differ.
- `single_model`: seconds of decode steps at batch 1 and 32 over 1024 tokens of context, with a CUDA
  graph and without, over what reading weights and KV once at the measured bandwidth allows, and
  over `transformers`; on the fast path, the generic one, and the fast one without our own kernel
  for a decode of one sequence (`gemms`: where that is slower, `ONE_ROW` in `models/gpu/fused.py`
  pays); what recording takes.
- `activation`: seconds to bring weights from pinned host memory into pages, mapping included, and
  that over the bandwidth of one plain copy. The host's bytes are one segment, again and again.
- `elastic_overhead`: that benchmark, on the GPU.
- `tests`: those with the marker `gpu`, each file in a process of its own.
- `sanitizer`: the small fleet under `compute-sanitizer`'s memcheck, where that is found.
- `sampling`: milliseconds to choose a step's tokens at a temperature from 128,256 logits a row, on
  the device and on the host, and whether they are the same.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.common import commit, result_table
from benchmarks.gpu_apart import TAIL, Findings, Part, apart, attempted, inside
from benchmarks.gpu_device import Gpu
from benchmarks.gpu_fleet import proved
from benchmarks.gpu_in_place import in_place

ROOT = Path(__file__).parents[1]
SECONDS = 560.0
"""Of all parts."""
PARTS = (
    Part("machine", 60),
    Part("pool", 40),
    Part("exactness", 120),
    Part("in_place", 60),
    Part("single_model", 150),
    Part("activation", 60),
    Part("elastic_overhead", 90),
    Part("tests", 150),
    Part("sanitizer", 90),
    Part("sampling", 30),
)
"""In the order of their worth. Their limits are more than all of them may take together: each takes
far less unless it hangs, which costs those at the end."""
CASES: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "float32, generic path": {"dtype": "float32", "impl": "generic"},
    "float32, two lanes": {"dtype": "float32", "lanes": 2},
    "float32, layers rotate": {"dtype": "float32", "rotating": True},
    "float32, KV is swapped": {"dtype": "float32", "swapping": True},
}
"""Of `exactness`."""
MOVES = ("evictions", "preemptions", "layers_loaded", "kv_moves")
"""Of which there are some, or exactness under pressure has not been shown."""
AT_ONCE = 4
"""Files of tests."""
SANITIZER = (
    "compute-sanitizer",
    "/usr/local/cuda/bin/compute-sanitizer",
    "/usr/local/cuda/compute-sanitizer/compute-sanitizer",
)
_ERRORS = re.compile(r"ERROR SUMMARY: (\d+) error")


def machine(gpu: Gpu, found: Findings) -> None:
    for key, value in gpu.facts().items():
        found[key] = value


def exactness(gpu: Gpu, found: Findings) -> None:
    for name, case in CASES.items():
        result = attempted(partial(proved, torch_device=gpu.device, **case))
        exact = case["dtype"] == "float32"
        if "broke_off" not in result:
            moved = sum(result[key] for key in MOVES) > 0
            result["passed"] = moved and result["wrong"] == 0 if exact else None
        found[name] = {**result, "must_be_exact": exact}


def elastic_overhead(found: Findings) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "found.json"
        command = [sys.executable, "-m", "benchmarks.elastic_overhead", "--quick"]
        subprocess.run([*command, "--device", "cuda:0", "--json", str(file)], check=True, cwd=ROOT)
        result: dict[str, Any] = json.loads(file.read_text())
    for key in (
        "throughput_ratio",
        "p99_tpot_ratio",
        "page_hand_overs_per_second",
        "tokens_per_second",
        "goal_met",
    ):
        found[key] = result[key]


def tests(found: Findings) -> None:
    """A fault of CUDA spoils its process for good: so a process for each file. Those of memory,
    which take all that there is, come first; the others run beside each other, as most of their
    time is Triton's compiler's."""
    every = sorted((ROOT / "tests").rglob("test_*.py"))
    files = [file for file in every if "mark.gpu" in file.read_text()]
    first = [file for file in files if file.parent.name == "memory"]
    for file in first:
        found[file.stem] = _tested(file)
    rest = [file for file in files if file not in first]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for file, result in zip(rest, pool.map(_tested, rest), strict=True):
            found[file.stem] = result
    found["passed"] = all(t["passed"] for t in found.values())


def _tested(file: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--tb=short", str(file)]
    # What libraries warn of on a GPU is no failure here.
    result = subprocess.run(
        command,
        env={**os.environ, "PYTEST_ADDOPTS": "-W default", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    print(result.stdout, result.stderr, sep="\n", flush=True)
    good = result.returncode == 0
    last = result.stdout.strip().splitlines()[-1:]
    return {"passed": good, "told": last, **({} if good else {"tail": result.stdout[-TAIL:]})}


def sanitizer(found: Findings) -> None:
    tool = next((path for name in SANITIZER if (path := shutil.which(name))), None)
    if tool is None:
        found["not_run"] = "compute-sanitizer is not on the PATH"
        return
    # The driver's errors reach us anyway; what it is asked on purpose (whether something is mapped,
    # whose a pointer is) is none.
    command = [tool, "--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "86"]
    fleet = [sys.executable, "-m", "benchmarks.gpu_fleet"]
    result = subprocess.run([*command, *fleet], capture_output=True, text=True, cwd=ROOT)
    print(result.stdout, result.stderr, sep="\n", flush=True)
    counts = _ERRORS.findall(result.stdout + result.stderr)
    if counts:
        found["errors"] = sum(map(int, counts))
    found["passed"] = result.returncode == 0 and bool(counts)
    if not found["passed"]:
        found["tail"] = (result.stdout + result.stderr)[-TAIL:]


def _speed(name: str) -> Callable[[Gpu, Findings], None]:
    # Not imported where it is not run: it needs Triton, as everything on a GPU does.
    from benchmarks import gpu_pages, gpu_speed

    where = next(m for m in (gpu_pages, gpu_speed) if name in vars(m))
    run: Callable[[Gpu, Findings], None] = getattr(where, name)
    return run


_HERE: dict[str, Callable[[Gpu, Findings], None]] = {
    "machine": machine,
    "exactness": exactness,
    "in_place": in_place,
}
_ALONE = {"elastic_overhead": elastic_overhead, "tests": tests, "sanitizer": sanitizer}
"""They start processes, to which they leave the device."""


def run_part(name: str, file: Path) -> int:
    """In the part's own process."""

    def run(found: Findings) -> None:
        if name in _ALONE:
            _ALONE[name](found)
        elif name in _HERE:
            _HERE[name](Gpu(), found)
        else:
            _speed(name)(Gpu(), found)

    return inside(run, file)


def main(argv: Sequence[str] | None = None) -> int:
    names = [p.name for p in PARTS]
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json", type=Path, default=Path("gpu_results.json"), metavar="FILE")
    parser.add_argument("--only", nargs="*", choices=names, metavar="PART")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of all parts")
    parser.add_argument("--part", nargs=2, metavar=("PART", "FILE"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.part is not None:
        return run_part(args.part[0], Path(args.part[1]))
    parts = [p for p in PARTS if args.only is None or p.name in {"machine", *args.only}]
    if not torch.cuda.is_available():
        why = f"PyTorch {torch.__version__} finds none"
        print(f"gpu_check: no GPU: {why}. On one it would run:", file=sys.stderr)
        for part in parts:
            print(f"  {part.name} (up to {part.seconds:g} s)", file=sys.stderr)
        return 2
    found = check(parts, args.json, args.seconds)
    Console().print(result_table("gpu_check", found))
    failed = unmet(found)
    print("\n".join(f"missed: {where}" for where in failed))
    return 1 if failed else 0


def unmet(found: Mapping[str, Any], path: str = "") -> list[str]:
    """Return the places of goals that are missed, of what did not pass, and of what did not run."""
    places = []
    for key, value in found.items():
        where = f"{path}.{key}".removeprefix(".")
        if isinstance(value, Mapping):
            places += unmet(value, where)
        elif key in ("not_run", "broke_off"):
            places.append(f"{path}: {value}")
        elif value is False and key in ("passed", "goal_met", "same_tokens"):
            places.append(where)
    return places


def check(parts: Sequence[Part], file: Path, seconds: float) -> dict[str, Any]:
    """What the parts found is in `file` as soon as one ends; what they print, beside it."""

    def save(found: Mapping[str, Any]) -> None:
        facts = {"day": time.strftime("%Y-%m-%d"), "commit": commit()}
        file.write_text(json.dumps({**facts, **found}, indent=2) + "\n")
        name, result = list(found.items())[-1]
        ended = next((f": {result[k]}" for k in ("broke_off", "not_run") if k in result), "")
        print(f"{name}{ended} ({result.get('took_seconds', 0):.0f} s)", file=sys.stderr, flush=True)

    def command(name: str, file: Path) -> list[str]:
        return [sys.executable, "-m", "benchmarks.gpu_check", "--part", name, str(file)]

    with tempfile.TemporaryDirectory() as folder, open(file.with_suffix(".log"), "w") as log:
        return apart(parts, command, seconds, Path(folder), log, save)


if __name__ == "__main__":
    sys.exit(main())
