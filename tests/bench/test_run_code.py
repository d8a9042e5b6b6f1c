"""Which code a benchmark's result depends on, on a small tree of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.everything import ROOT, RUNS
from benchmarks.run_code import code_files, code_hash

TREE = {
    "ballast/__init__.py": "",
    "ballast/cli_bench.py": "x = 1",
    "ballast/core/__init__.py": "",
    "ballast/core/a.py": '"""Text."""\n\ndef f():\n    """More."""\n    return 1  # why\n',
    "ballast/live/__init__.py": "",
    "ballast/live/cuda_machine.py": "g = 1",
    "ballast/live/machine.py": "from ballast.live.cuda_machine import g",
    "ballast/policy/memory/kvswap.py": "k = 1",
    "ballast/policy/presets.py": 'PRESETS = ("static", "kvswap")',
    "ballast/sim/__init__.py": "",
    "ballast/sim/clock.py": "from ballast.live.cuda_machine import g\n\ntick = g",
    "ballast/sim/link.py": "rate = 1",
    "ballast/sim/profiles/gpu.toml": "speed = 1",
    "benchmarks/__init__.py": "",
    "benchmarks/baseline.py": "from benchmarks import rows",
    "benchmarks/child.py": "y = 1",
    "benchmarks/every.py": "from ballast.policy.presets import PRESETS\n\nROWS = list(PRESETS)\n",
    "benchmarks/gpu.py": "from ballast.live import cuda_machine",
    "benchmarks/live.py": '"""Not kvswap."""\nCOMMAND = ("-m", "benchmarks.child")',
    "benchmarks/rows.py": 'ROWS = ("kvswap_dirty",)',
    "benchmarks/virtual.py": """
from ballast.policy.presets import PRESETS

def main():
    from ballast.sim import clock
    clock.tick
    load(file, presets=PRESETS)
""",
}
CHANGES = {
    "a docstring": ("ballast/core/a.py", TREE["ballast/core/a.py"].replace("More", "Less"), ""),
    "a comment": ("ballast/core/a.py", TREE["ballast/core/a.py"].replace("# why", ""), ""),
    "a server's code": (
        "ballast/core/a.py",
        TREE["ballast/core/a.py"].replace("return 1", "return 2"),
        "baseline every gpu live virtual",
    ),
    "code of GPUs alone": ("ballast/live/cuda_machine.py", "g = 2", "gpu"),
    "a baseline's policy": ("ballast/policy/memory/kvswap.py", "k = 2", "baseline every"),
    "a started benchmark": ("benchmarks/child.py", "y = 2", "live"),
    "an imported simulator's module": ("ballast/sim/clock.py", "tick = 2", "virtual"),
    "a simulator's module that is not imported": ("ballast/sim/link.py", "rate = 2", ""),
    "the simulator's data": ("ballast/sim/profiles/gpu.toml", "speed = 2", "virtual"),
    "the command line's other subcommands": ("ballast/cli_bench.py", "x = 2", ""),
    "a compiled kernel": ("ballast/core/__pycache__/a.f-1.py311.nbc", "code", ""),
    "a new module": ("ballast/core/b.py", "z = 1", "baseline every gpu live virtual"),
}
BENCHMARKS = ("baseline", "every", "gpu", "live", "virtual")


def make(root: Path) -> Path:
    for name, text in TREE.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_makes_stale_what_depends_on_it(change: str, tmp_path: Path) -> None:
    before, after = make(tmp_path / "before"), make(tmp_path / "after")
    name, text, stale = CHANGES[change]
    (after / name).parent.mkdir(exist_ok=True)
    (after / name).write_text(text)
    changed = [b for b in BENCHMARKS if code_hash(b, before) != code_hash(b, after)]
    assert changed == stale.split()


def test_a_live_benchmark_does_not_depend_on_the_simulator() -> None:
    files = {name: code_files(name, ROOT) for name in ("switch", "sim_fidelity")}
    assert ROOT / "ballast/engine/loop.py" in files["switch"]
    assert ROOT / "benchmarks/child_ballast.py" in files["switch"]
    assert not any(ROOT / "ballast/sim" in file.parents for file in files["switch"])
    assert ROOT / "ballast/sim/runner.py" in files["sim_fidelity"]


def test_every_run_of_everything_is_a_benchmark() -> None:
    assert all((ROOT / "benchmarks" / f"{run.name}.py").is_file() for run in RUNS)
    assert len({run.file_name for run in RUNS}) == len(RUNS)
