"""Run compiled kernels, one or a program of many, on PyTorch's own OpenMP threads.

Used by all CPU kernels and by the fused model's passes.

PyTorch's GEMMs leave their worker threads spinning for milliseconds, waiting for the next region.
A second pool of threads (Numba's `omp`, `workqueue` or `tbb` layer) would have to fight them for
the cores at every layer. So kernels run as one more region of the pool that PyTorch uses already:
`GOMP_parallel` of the very OpenMP library that `libtorch_cpu` is linked with.

Decode steps of a Llama (4 layers, 8 heads of 32, 4 sequences) on 2 cores, in turns, tenth
percentiles against this, at contexts of 128 and 1024 tokens: Numba's `workqueue` takes 1.17 and
1.50 times as long, serial kernels 1.08 and 1.36, Numba's `omp` 1.02 and 1.02. The last is nearly as
good only where the dynamic linker happens to give it PyTorch's OpenMP instead of the system's.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ballast.kernels import binding_code, program_code

Array = np.ndarray[Any, Any]

Region = Callable[[int, int | None, int, int], None]


def run(kernel: int, arguments: int, workers: int) -> None:
    """Call the kernel at address `kernel` with `arguments` in up to `workers` threads at once.

    A kernel is a C function `void (void *)` that shares work between its callers by itself, such
    as through an atomic counter; it has to be right if only one thread calls it. Returns when all
    have returned. The GIL is not held. `workers` is cut to what PyTorch may use on this thread.
    """
    region = _region()
    n = min(workers, torch.get_num_threads())
    if n > 1 and region is not None:
        region(kernel, arguments, n, 0)
    else:
        _Kernel(kernel)(arguments)


_Kernel = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_compiling = threading.Lock()


class Program:
    """Operations that a team runs one after the other without leaving its region."""

    def __init__(self, operations: Array) -> None:
        """`operations`: int64 (n, 2), address of a kernel and of its table, in order.

        Their tables, and what these point to, have to outlive this.
        """
        self._operations = np.ascontiguousarray(operations, np.int64)
        self._kernel = program_kernel()
        self._table = program_tables(self._operations[None])[0]
        self._address = self._table.ctypes.data

    def run(self, workers: int) -> None:
        """Run all operations with up to `workers` threads; a program may run many times.

        The caller must reset the counters in the operations' own tables before each run.
        """
        self._table[program_code.PROGRESS] = 0
        run(self._kernel, self._address, workers)


def program_kernel() -> int:
    """Address of the kernel that runs a program, given its table (`program_tables`): a program can
    be an operation of another one."""
    with _compiling:
        return program_code.address()


def program_tables(operations: Array) -> Array:
    """int64 (programs, fields) for `operations` (programs, n, 2) that outlive them: as Program has.

    Before each run PROGRESS has to be set to 0.
    """
    # Rows are two cache lines long: no counter of arrivals shares one with anything else.
    count = len(operations)
    raw = np.zeros(count * program_code.N_FIELDS + 8, np.int64)
    skip = -(raw.ctypes.data // 8) % 8
    tables = raw[skip : skip + count * program_code.N_FIELDS].reshape(count, program_code.N_FIELDS)
    tables[:, program_code.OPERATIONS] = rows_of(operations)
    tables[:, program_code.N_OPERATIONS] = operations.shape[1]
    tables[:, program_code.YIELD] = address_in_openmp("sched_yield")
    return tables


def rows_of(tables: Array) -> Array:
    """int64 (n,): address of each of n tables, along the first dimension."""
    found: Array = tables.ctypes.data + np.arange(len(tables)) * tables.strides[0]
    return found


def bind(cpus: Sequence[int]) -> None:
    """Bind the calling thread, and those of its team, to one of `cpus` each, in order.

    For a team with a thread for every CPU. Unbound, the scheduler of a virtual machine was seen to
    wake two of them on one CPU after a pause. Each barrier then costs turns of the scheduler, and a
    decode step takes up to five times as long, until threads are moved apart after some 40 ms.
    Costs as much as starting a region. Does nothing where the system has no such call, and for CPUs
    beyond those of the C library's `cpu_set_t`.
    """
    most = 64 * binding_code.WORDS
    if len(cpus) < 2 or _region() is None or not hasattr(_openmp(), "sched_setaffinity"):
        return
    if len(cpus) > torch.get_num_threads() or max(cpus) >= most:
        return
    masks = np.zeros((len(cpus), binding_code.WORDS), np.uint64)
    for mask, cpu in zip(masks, cpus, strict=True):
        mask[cpu // 64] = 1 << cpu % 64
    table = np.zeros(binding_code.N_FIELDS, np.int64)
    table[binding_code.NUMBER] = address_in_openmp("omp_get_thread_num")
    table[binding_code.ALLOW] = address_in_openmp("sched_setaffinity")
    table[binding_code.MASKS] = masks.ctypes.data
    with _compiling:
        kernel = binding_code.address()
    run(kernel, table.ctypes.data, len(cpus))


@functools.cache
def _openmp() -> ctypes.CDLL:
    """Return the library to which PyTorch's own OpenMP calls go."""
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))


@functools.cache
def _region() -> Region | None:
    """Return `GOMP_parallel` as PyTorch resolves it; None if its OpenMP is of another kind."""
    try:
        found = _openmp().GOMP_parallel
    except (OSError, AttributeError):
        return None
    found.restype = None
    found.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    return found


@functools.cache
def address_in_openmp(name: str) -> int:
    """Return the address of a C function `int (void)` of PyTorch's OpenMP, or of the C library."""
    return ctypes.cast(getattr(_openmp(), name), ctypes.c_void_p).value or 0
