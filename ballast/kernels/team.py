"""Run a compiled kernel on PyTorch's own OpenMP threads.

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
