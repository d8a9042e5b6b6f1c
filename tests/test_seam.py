"""The seam: engine and policy must not know whether they run live or in virtual time."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import ballast

ROOT = Path(ballast.__file__).parent
BLIND = [
    *(ROOT / "engine" / f"{name}.py" for name in ("state", "plan", "apply", "loop", "build")),
    ROOT / "engine" / "report.py",
    *sorted((ROOT / "policy").glob("*.py")),
]
"""Files shared by both worlds."""

FORBIDDEN_MODULES = (
    "time",
    "datetime",
    "threading",
    "queue",
    "asyncio",
    "os",
    "random",
    "torch",
    "ballast.sim",
    "ballast.engine.inbox",
    "ballast.engine.runner",
    "ballast.engine.runner_cuda",
    "ballast.engine.machine_cuda",
    "ballast.engine.device",
    "ballast.memory.vm_memfd",
    "ballast.memory.vm_null",
)
FORBIDDEN_NAMES = {
    "VirtualClock",
    "MonotonicClock",
    "EventHeap",
    "QueueInbox",
    "SimRunner",
    "CpuRunner",
    "SimLink",
    "HostLink",
    "NullVm",
    "MemfdVm",
}
WORLD_PARTS = {"clock", "inbox", "runner", "vm", "link", "pool"}


def offences(source: str) -> list[str]:
    """Everything in `source` by which it could tell the worlds apart."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            names = []
        found += [
            f"imports {n}"
            for n in names
            for f in FORBIDDEN_MODULES
            if n == f or n.startswith(f"{f}.")
        ]
        if isinstance(node, ast.Name) and node.id in FORBIDDEN_NAMES:
            found.append(f"names {node.id}")
        if isinstance(node, ast.alias) and node.name.split(".")[-1] in FORBIDDEN_NAMES:
            found.append(f"imports {node.name}")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            asks = node.func.id in {"isinstance", "type", "hasattr", "getattr", "issubclass"}
            if asks and node.args:
                asked = ast.unparse(node.args[0]).split(".")[-1].lstrip("_")
                if asked in WORLD_PARTS:
                    found.append(f"asks what {ast.unparse(node.args[0])} is")
    return found


@pytest.mark.parametrize("path", BLIND, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_engine_and_policy_do_not_know_their_world(path: Path) -> None:
    assert offences(path.read_text()) == []


@pytest.mark.parametrize(
    "leak",
    [
        "import time",
        "from ballast.sim.heap import EventHeap",
        "from ballast.core.clock import VirtualClock",
        "def f(self):\n    return isinstance(self.clock, object)",
        "def f(self):\n    return hasattr(self._inbox, 'schedule')",
        "from ballast.memory import vm_null",
    ],
)
def test_the_test_can_fail(leak: str) -> None:
    assert offences(leak)
