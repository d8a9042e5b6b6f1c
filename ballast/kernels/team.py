"""Run a compiled kernel on PyTorch's own OpenMP threads.

PyTorch's GEMMs leave their worker threads spinning for milliseconds, waiting for the next region.
A second pool of threads (Numba's `omp`, `workqueue` or `tbb` layer) would have to fight them for
the cores at every layer. So kernels run as one more region of the pool that PyTorch uses already:
`GOMP_parallel` of the very OpenMP library that `libtorch_cpu` is linked with.

Measured in a decode loop of a Llama with 8 layers on 2 cores (`benchmarks/attention.py`, medians of
runs in turns), a step with Numba's `omp` layer takes 2 to 3 times as long, with `workqueue` 1.1 to
1.3 times, and with a serial kernel as long, up to contexts where attention counts.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import torch

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


@functools.cache
def _region() -> Region | None:
    """`GOMP_parallel` as PyTorch resolves it; None where its OpenMP is of another kind."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        found = ctypes.CDLL(str(library)).GOMP_parallel
    except (OSError, AttributeError):
        return None
    found.restype = None
    found.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    return found
