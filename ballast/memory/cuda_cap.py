"""PyTorch's own memory on a GPU stays within what the arena holds back for it."""

from __future__ import annotations

import torch


class CachingCap:
    """Caps PyTorch's caching allocator on one device at the bytes of the arena.

    The cap is the allocator's own: beyond it, it first frees what it keeps unused, and then raises
    `torch.OutOfMemoryError` in the job. It covers cuBLAS workspaces and the pools of CUDA graphs,
    which come from that allocator; not the context, nor what other libraries allocate.
    """

    def __init__(self, ordinal: int, n_bytes: int) -> None:
        self._ordinal = ordinal
        self.n_bytes = 0
        self.resize(n_bytes)

    @property
    def used(self) -> int:
        """Bytes that the allocator has of the driver, in use or kept."""
        # Once a job: `memory_reserved` would flatten all that the allocator counts.
        told = torch.cuda.memory_stats_as_nested_dict(self._ordinal)
        return int(told["reserved_bytes"]["all"]["current"]) if told else 0

    def resize(self, n_bytes: int) -> bool:
        """From now on, `n_bytes`. Whether no more is in use already; that is not taken back."""
        self.n_bytes = n_bytes
        # Which of the two the allocator takes a part of is not documented; the larger is safe.
        _, total = torch.cuda.mem_get_info(self._ordinal)
        whole = max(total, torch.cuda.get_device_properties(self._ordinal).total_memory)
        torch.cuda.set_per_process_memory_fraction(min(1.0, n_bytes / whole), self._ordinal)
        return self.check()

    def check(self) -> bool:
        """Frees what is kept unused, if that is too much; whether the cap holds now."""
        if self.used > self.n_bytes:
            torch.cuda.empty_cache()
        return self.used <= self.n_bytes
