"""The seam: what both worlds run must not know whether it runs live or in virtual time.

A file is shared if live serving and the simulator both import it, however indirectly.
"""

from __future__ import annotations

import ast
from collections.abc import Collection
from functools import cache
from pathlib import Path

import pytest

import ballast

ROOT = Path(ballast.__file__).parent
MODULES = {
    ".".join(("ballast", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): path
    for path in ROOT.rglob("*.py")
}
LIVE = "ballast.cluster.worker.process", "ballast.cluster.controller"
VIRTUAL = "ballast.sim.cluster"


@cache
def _imported(path: Path) -> set[str]:
    """Modules of Ballast that a file imports when it runs, wherever in it the import stands."""
    found: set[str] = set()
    nodes: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            nodes += node.orelse
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
        nodes += ast.iter_child_nodes(node)
    return found & MODULES.keys()


def _reached(*roots: str) -> set[str]:
    """These modules and all modules of Ballast that they import, directly or not."""
    found: set[str] = set()
    wanted = set(roots)
    while wanted:
        module = wanted.pop()
        found.add(module)
        wanted |= _imported(MODULES[module]) - found
    return found


@cache
def _shared() -> frozenset[str]:
    """Modules that both worlds run. Of the policies also those that only one of them names."""
    return frozenset(_reached(*LIVE) & _reached(VIRTUAL)) | {m for m in MODULES if ".policy." in m}


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
    "ballast.live.inbox",
    "ballast.live.runner",
    "ballast.live.cuda_runner",
    "ballast.live.cuda_machine",
    "ballast.live.device",
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
HARMLESS = {
    "ballast": {"os"},
    "ballast.fleet.gguf_header": {"os"},
    "ballast.fleet.unfinished_download": {"os"},
    "ballast.memory.free_pages": {"threading"},
    "ballast.memory.pool": {"threading"},
    "ballast.memory.syscalls": {"os"},
    "ballast.memory.transfer": {"threading"},
    "ballast.memory.vm": {"os"},
    "ballast.policy.fleet.fixed_placement": {"random"},
    "ballast.weights.stored": {"os"},
}
"""What modules beneath both worlds need of the machine, and decide nothing by: the environment of
threads, locks, descriptors, files, names of errors, and draws from a stated seed. `transfer` has
the live link beside the protocol of both."""
WORLD_PARTS = {"clock", "inbox", "runner", "vm", "link", "pool"}


def offences(source: str, harmless: Collection[str] = ()) -> list[str]:
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
            if f not in harmless and (n == f or n.startswith(f"{f}."))
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


def test_what_both_worlds_run_does_not_know_its_world() -> None:
    found = {
        module: offences(MODULES[module].read_text(encoding="utf-8"), HARMLESS.get(module, ()))
        for module in sorted(_shared())
    }
    assert len(found) > 200
    assert {module: told for module, told in found.items() if told} == {}


def test_the_shared_modules_are_those_that_decide() -> None:
    """The loop and all that it imports is shared; what a world brings with it is not."""
    assert _reached("ballast.engine.loop") <= _shared()
    own = {"runner", "inbox", "machine", "device", "grammar_compiler"}
    assert not {f"ballast.live.{name}" for name in own} & _shared()
    assert not [module for module in _shared() if module.startswith("ballast.sim")]
    assert HARMLESS.keys() <= _shared() | {"ballast"}


def test_imports_are_followed_into_functions_but_not_into_annotations(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n"
        "    from ballast.live import runner\n"
        "def f():\n"
        "    from ballast.core import clock\n"
        "    import ballast.live.inbox\n"
    )
    assert _imported(file) == {"ballast.core", "ballast.core.clock", "ballast.live.inbox"}


@pytest.mark.parametrize(
    "leak",
    [
        "import time",
        "from ballast.sim.event_heap import EventHeap",
        "from ballast.core.clock import VirtualClock",
        "def f(self):\n    return isinstance(self.clock, object)",
        "def f(self):\n    return hasattr(self._inbox, 'schedule')",
        "from ballast.memory import vm_null",
    ],
)
def test_the_test_can_fail(leak: str) -> None:
    assert offences(leak)
