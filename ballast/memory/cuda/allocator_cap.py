"""Cap PyTorch's caching allocator on a GPU at the bytes that the arena sets aside for it.

Used by the GPU runner: activations beyond the cap fail the job, and never take pages of the pool.
"""

from __future__ import annotations

import threading

import torch

_caps: dict[int, list[CudaAllocatorCap]] = {}
"""Open caps of this process, by device ordinal."""
_changing = threading.Lock()
"""Held while `_caps` or the bytes of one of them change."""


class CudaAllocatorCap:
    """Caps PyTorch's caching allocator on one GPU at the bytes of the arena.

    The cap is the allocator's own: beyond it, it first frees what it keeps unused, and then raises
    `torch.OutOfMemoryError` in the job. It covers cuBLAS workspaces and the pools of CUDA graphs,
    which come from that allocator; not the context, nor what other libraries allocate.

    A process has one allocator for each GPU. Where several devices of one process are on the same
    GPU, the allocator may have the sum of their caps, and each is held to that sum.
    """

    def __init__(self, ordinal: int, n_bytes: int) -> None:
        self._ordinal = ordinal
        self.n_bytes = 0
        with _changing:
            _caps.setdefault(ordinal, []).append(self)
        self.resize(n_bytes)

    @property
    def used(self) -> int:
        """Bytes that the allocator holds from the driver, in use or cached."""
        # Once a job: `memory_reserved` would flatten all that the allocator counts.
        stats = torch.cuda.memory_stats_as_nested_dict(self._ordinal)
        return int(stats["reserved_bytes"]["all"]["current"]) if stats else 0

    @property
    def allowed(self) -> int:
        """Bytes that the allocator may hold: the sum of this process's caps on the GPU."""
        return sum(cap.n_bytes for cap in _caps.get(self._ordinal, ()))

    def resize(self, n_bytes: int) -> bool:
        """Set the cap to `n_bytes`; return whether the allocator is within it. Memory already in
        use is not freed."""
        with _changing:
            self.n_bytes = n_bytes
            self._apply(self.allowed)
        return self.check()

    def check(self) -> bool:
        """Free cached memory if the cap is exceeded; return whether the cap holds now."""
        if self.used > self.allowed:
            torch.cuda.empty_cache()
        return self.used <= self.allowed

    def close(self) -> None:
        """Remove this cap; without any cap, the allocator may use all of the GPU."""
        with _changing:
            left = _caps.get(self._ordinal, [])
            if self in left:
                left.remove(self)
                self._apply(self.allowed if left else None)

    def _apply(self, n_bytes: int | None) -> None:
        # Which of the two the allocator takes a part of is not documented; the larger is safe.
        _, total = torch.cuda.mem_get_info(self._ordinal)
        whole = max(total, torch.cuda.get_device_properties(self._ordinal).total_memory)
        fraction = 1.0 if n_bytes is None else min(1.0, n_bytes / whole)
        torch.cuda.set_per_process_memory_fraction(fraction, self._ordinal)
