"""Check software, processor, matrix kernels and process limits for `ballast doctor`."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from ballast.bench.doctor_finding import Finding, judged
from ballast.isolation.confinement import missing
from ballast.kernels.choice_file import ChoiceFile
from ballast.kernels.compiled import cache_directory
from ballast.memory.control_groups import control_groups

_LEAST_TORCH = (2, 11)
_LEAST_FILES = 1024
_LEAST_THREADS = 256


def software() -> Iterator[Finding]:
    """Operating system, Python, PyTorch and what else decides whether anything runs."""
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    yield judged(
        "system",
        system,
        "Ballast's page pool needs Linux (memfd, fixed mappings)",
        fail=platform.system() != "Linux",
    )
    yield judged(
        "python",
        platform.python_version(),
        "install Python 3.11 or newer and run `make setup` again",
        fail=sys.version_info < (3, 11),
    )
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    idle_cuda = torch.version.cuda is not None and not torch.cuda.is_available()
    yield judged(
        "torch",
        f"{torch.__version__}, {build}" + (", but no GPU is usable" if idle_cuda else ""),
        "install torch 2.13.0 (`make setup`); on a machine without a GPU from the CPU index "
        "(BALLAST_TORCH_INDEX, see scripts/setup)",
        fail=version < _LEAST_TORCH,
        warn=idle_cuda,
    )
    names = ("transformers", "numba", "pyzmq", "fastapi")
    yield judged("libraries", ", ".join(f"{n} {importlib.metadata.version(n)}" for n in names), "")


def processor() -> Iterator[Finding]:
    """Cores this process may use, and instructions that decide the speed of bfloat16."""
    cores = len(os.sched_getaffinity(0))
    quota = _cpu_quota()
    found = f"{cores} cores"
    if quota is not None:
        found += f", of which the control group grants {quota:.4g}"
    usable = min(cores, quota) if quota is not None else cores
    yield judged(
        "cores",
        found,
        "engine, server and client share the cores: give this process two or more, "
        "and set `devices[0].threads` to no more than are granted",
        warn=usable < 2 or (quota is not None and quota < cores),
    )
    capability = torch.backends.cpu.get_cpu_capability()
    bf16 = _bf16()
    yield judged(
        "instructions",
        f"{capability}, {'bfloat16 in hardware' if bf16 else 'no bfloat16 instructions'}",
        "bfloat16 models will be slow here: serve them with `dtype: float32`",
        warn=not bf16,
    )


def caches() -> Finding:
    """Whether kernels that are compiled or measured can be kept for later starts."""
    directory, file = cache_directory(), ChoiceFile.of_user()
    parts = [f"compiled kernels in {directory}" if directory else "no place for compiled kernels"]
    fault = None if file is None else file.fault()
    if file is not None:
        where = f"measured choices in {file.path}" if file.path else "no place for measured choices"
        parts.append(where if fault is None else f"{where} ({fault})")
    return judged(
        "caches",
        "; ".join(parts),
        "without them each start takes a minute longer: name a directory that can be written in "
        "NUMBA_CACHE_DIR",
        warn=directory is None or fault is not None,
    )


def kernels() -> Iterator[Finding]:
    """Which kernel multiplies matrices, as far as it was measured here for models loaded so far."""
    file = ChoiceFile.of_user()
    for machine in file.here() if file is not None else ():
        by_dtype: dict[str, list[int | None]] = {}
        for shape, choice in sorted(machine.choices.items()):
            by_dtype.setdefault(shape.split()[0], []).append(choice.from_rows)
        parts = [_chosen(dtype, found) for dtype, found in by_dtype.items()]
        yield judged("kernels", f"{machine.threads} threads: {'; '.join(parts)}", "")


def _chosen(dtype: str, from_rows: list[int | None]) -> str:
    """Describe for how many matrix shapes oneDNN is used, and from how many rows on."""
    used = sorted(rows for rows in from_rows if rows is not None)
    if not used:
        return f"{dtype} by ours"
    start = f"{used[0]}" if used[0] == used[-1] else f"{used[0]} to {used[-1]}"
    return f"{dtype} by oneDNN from {start} rows on, {len(used)} of {len(from_rows)} shapes"


def limits() -> Iterator[Finding]:
    """Limits that the administrator, the shell or the kernel set for this process."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    yield judged(
        "open files",
        _limit(files),
        f"each client takes one: `ulimit -n {_LEAST_FILES * 4}`",
        warn=files != resource.RLIM_INFINITY and files < _LEAST_FILES,
    )
    threads = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    yield judged(
        "threads",
        _limit(threads),
        f"`ulimit -u {_LEAST_THREADS * 16}`",
        warn=threads != resource.RLIM_INFINITY and threads < _LEAST_THREADS,
    )
    lacking = missing()
    yield judged(
        "confinement",
        f"no {' and no '.join(lacking)}" if lacking else "seccomp and Landlock",
        "a parser that a hostile file has taken over can do more than read files: use a kernel and "
        "a container runtime that have them",
        warn=bool(lacking),
    )
    addresses = resource.getrlimit(resource.RLIMIT_AS)[0]
    yield judged(
        "addresses",
        _limit(addresses),
        "ranges are reserved far beyond what is used: `ulimit -v unlimited`",
        fail=addresses != resource.RLIM_INFINITY,
    )
    mode = _read("/proc/sys/vm/overcommit_memory")
    yield judged(
        "overcommit",
        f"vm.overcommit_memory = {mode or 'unknown'}",
        "strict accounting counts reserved addresses: `sysctl vm.overcommit_memory=0`",
        warn=mode == "2",
    )


def _bf16() -> bool:
    flags = set((_read("/proc/cpuinfo") or "").replace("\n", " ").split())
    return bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})


def _cpu_quota() -> float | None:
    """Cores' worth of time granted by the control groups of this process; None: no bound."""
    quotas = []
    for group in control_groups("cpu"):
        if group.version == 2:
            quota, _, period = (group.read("cpu.max") or "max").partition(" ")
        else:
            files = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            quota, period = (group.read(file) or "" for file in files)
        if quota.isdecimal() and period.isdecimal():  # `max`, or -1: no bound
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value}"


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None
