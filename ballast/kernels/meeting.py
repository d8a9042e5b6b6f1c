"""All-gather tensors of a tensor-parallel group's CPU ranks, through memory that all of them map.

Used by `models.parallel.exchanges` (`SharedExchange`).

::

    counters | slots 0: rank 0, rank 1, .. | slots 1: rank 0, rank 1, ..

A rank writes its part into its slot, and reads the others' parts after a barrier. The two sets of
slots alternate: before a rank overwrites a slot it has passed a barrier after all others read it.
"""

from __future__ import annotations

import mmap
import os
import threading

import numpy as np
import torch
from torch import Tensor

from ballast.core.errors import BrokenPromise
from ballast.core.units import ceil_div
from ballast.kernels import meeting_code as code
from ballast.kernels import team
from ballast.memory.tensor import tensor_at

_compiling = threading.Lock()


class Meeting:
    """One rank's end of an all-gather, for one thread. Parts have at most `capacity` bytes."""

    def __init__(self, fd: int, rank: int, ranks: int, capacity: int) -> None:
        """`fd`: an empty memfd, the same on all ranks; the caller may close it afterwards. Memory
        is allocated where a part is first written."""
        head = ceil_div(ranks * code.COUNTER_BYTES, mmap.PAGESIZE) * mmap.PAGESIZE
        self._capacity = ceil_div(capacity, mmap.PAGESIZE) * mmap.PAGESIZE
        size = head + 2 * ranks * self._capacity
        os.ftruncate(fd, size)
        self._memory = mmap.mmap(fd, size)
        base = int(np.frombuffer(self._memory, np.uint8).ctypes.data)
        slots = (2, ranks, self._capacity // 4)
        self._slots = tensor_at(base + head, slots, torch.float32)
        self._turn = 0
        self._rank = rank
        with _compiling:
            self._kernel = code.address()
        self._table = np.zeros(code.N_FIELDS, np.int64)
        self._table[code.COUNTERS] = base
        self._table[code.RANK], self._table[code.RANKS] = rank, ranks
        self._table[code.YIELD] = team.address_in_openmp("sched_yield")
        self._address = self._table.ctypes.data

    def close(self) -> None:
        """Unmap the memory. No further call, and no use of gathered tensors, is allowed."""
        self._memory.close()

    def all_gather(self, part: Tensor) -> Tensor:
        """Return (ranks, ...), every rank's float32 part (...), valid until the next call.

        Blocks until all ranks have called it, without a timeout: if a rank dies, the parent must
        end this process.
        """
        n = part.numel()
        if 4 * n > self._capacity or part.dtype != torch.float32:
            raise BrokenPromise(f"a part of {n} numbers of {part.dtype} in {self._capacity} bytes")
        slots = self._slots[self._turn, :, :n]
        self._turn = 1 - self._turn
        slots[self._rank].view(part.shape).copy_(part)
        team.run(self._kernel, self._address, 1)
        return slots.view(len(slots), *part.shape)
