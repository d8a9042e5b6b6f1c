"""Hash the code that a benchmark's figures depend on, so that its result is known to be stale.

A benchmark runs its own module, what that imports, the modules it starts by name as processes, and
all of `ballast` that a server is made of. Of the packages above a server only what it imports
counts: a change of the simulator makes no figure of a live benchmark stale. Comments and docstrings
do not count, nor does the policy of a baseline that the benchmark does not name, nor, as
`everything` runs on CPUs, what runs on a GPU alone.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ABOVE_SERVER = ("sim", "bench", "dashboard", "cli_bench", "cli_place", "cli_simulate", "cli_story")
"""Of `ballast`: counted where imported; nothing below may import them (`tool.importlinter`)."""

BASELINES = {Path("ballast/policy/memory/kvswap.py"): "kvswap"}
"""Memory policies that no fleet has unless it states their preset, given beside them."""

ON_GPUS = (
    "ballast/cluster/tensor_parallel/cuda_*.py",
    "ballast/kernels/gpu/*.py",
    "ballast/kernels/plain/*.py",
    "ballast/kernels/triton/*.py",
    "ballast/kv/pinned_spill.py",
    "ballast/live/cuda_*.py",
    "ballast/live/event_stream.py",
    "ballast/live/never_run.py",
    "ballast/memory/cuda/*.py",
    "ballast/models/gpu/*.py",
)
"""Modules of which a server without a GPU runs nothing but tests whether it has one: counted where
a benchmark itself imports one of them."""


def code_hash(benchmark: str, root: Path) -> str:
    """Hash of all code that `python -m benchmarks.<benchmark>` can run, of the checkout `root`."""
    digest = hashlib.sha256()
    for path in sorted(code_files(benchmark, root)):
        digest.update(f"{path.relative_to(root)}\n".encode())
        digest.update(normal_code(path))
    return digest.hexdigest()[:16]


def code_files(benchmark: str, root: Path) -> set[Path]:
    """Files with code and data that `python -m benchmarks.<benchmark>` can use."""
    found = set(_server_files(root))
    pending = [root / "benchmarks" / f"{benchmark}.py"]
    while pending:
        path = pending.pop()
        if path in found:
            continue
        found.add(path)
        pending += _imported_files(path, root)
    own = found - _server_files(root)
    found -= {
        root / policy
        for policy, preset in BASELINES.items()
        if not any(_can_state(path, preset) for path in own)
    }
    on_gpus = {path for pattern in ON_GPUS for path in root.glob(pattern)}
    benchmarks = (path for path in own if path.parent == root / "benchmarks")
    if not any(on_gpus.intersection(_imported_files(path, root)) for path in benchmarks):
        found -= on_gpus
    return found | {  # a package's data goes with its modules
        data
        for folder in {path.parent for path in found} - {root / "ballast", root / "benchmarks"}
        for data in folder.rglob("*")
        if data.is_file() and data.suffix != ".py" and "__pycache__" not in data.parts
    }


@cache
def normal_code(path: Path) -> bytes:
    """Content of a file; of a Python module without comments, docstrings and layout."""
    if path.suffix != ".py":
        return path.read_bytes()
    return ast.dump(_without_texts(path)).encode()


def _without_texts(path: Path) -> ast.Module:
    """A Python module without docstrings."""
    module = ast.parse(path.read_bytes())
    for node in ast.walk(module):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [line for line in node.body if not _is_text(line)]
    return module


def _is_text(statement: ast.stmt) -> bool:
    """Whether a statement is a string alone: a docstring, or one that documents an attribute."""
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


@cache
def _can_state(path: Path, preset: str) -> bool:
    """Whether a module has the name of a preset in a text, or has the names of all presets for
    anything but to check a fleet file's."""
    if path.suffix != ".py":
        return False
    imported = False
    names = checks = 0
    for node in ast.walk(_without_texts(path)):
        match node:
            case ast.Constant(value=str(text)) if preset in text:
                return True
            case ast.ImportFrom(module="ballast.policy.presets", names=aliases):
                imported |= any(alias.name == "PRESETS" for alias in aliases)
            case ast.Name(id="PRESETS") | ast.Attribute(attr="PRESETS"):
                names += 1
            case ast.keyword(arg="presets", value=ast.Name(id="PRESETS")):
                checks += 1
    return imported and names > checks


@cache
def _server_files(root: Path) -> frozenset[Path]:
    """All of `ballast` but what stands above a server."""
    package = root / "ballast"
    return frozenset(
        path
        for path in package.rglob("*.py")
        if path.relative_to(package).parts[0].removesuffix(".py") not in ABOVE_SERVER
    )


@cache
def _imported_files(path: Path, root: Path) -> tuple[Path, ...]:
    """Modules of the project that one imports, anywhere in it, or names as benchmarks to start."""
    if path.suffix != ".py":
        return ()
    files = []
    for name in _names(ast.parse(path.read_bytes())):
        parts = name.split(".")
        if parts[0] not in {"ballast", "benchmarks"}:
            continue
        for end in range(1, len(parts) + 1):  # a package's `__init__` runs as well
            place = root.joinpath(*parts[:end])
            files += [
                file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file()
            ]
    return tuple(files)


def _names(module: ast.Module) -> Iterator[str]:
    """Dotted names that a module imports, also `name.attribute`, and texts `benchmarks.name`."""
    for node in ast.walk(module):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(source), names=names, level=0):
                yield from (f"{source}.{alias.name}" for alias in names)
            case ast.Constant(value=str(text)) if text.startswith(("benchmarks.", "ballast.")):
                yield text if text.replace(".", "").isidentifier() else ""
