"""What it takes to resize a KV cache of 1 to 100,000 blocks by a page (SwiftCache, 3.4).

The paper's layer-major layout moves layers x blocks when a cache grows or shrinks by one block; its
block-major one appends. Here a cache grows by any free page of the device, wherever that lies, and
another model's cache has it at once. Real pages of the operating system, four blocks to a page.

- `us`: microseconds of processor time to take one page more, and to give it back, of a cache that
  has so many blocks in use; medians. `largest_over_smallest`: of 100,000 blocks over that of one.
- `hand_over_us`: the same for a page that changes between two such caches.
- `us_per_page`: of growing to so many blocks at once, and shrinking to none, on memory that was in
  use before.
- `moved`: blocks whose bytes were copied, or whose page was replaced. Goal 0.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace

from ballast.core.model import ModelSpec
from ballast.core.units import KiB
from ballast.kv.blocks import KvCache
from ballast.memory.pool import Pool
from ballast.memory.vm_memfd import MemfdVm
from benchmarks.common import finish, options

PAGE = 4 * KiB
PER_PAGE = 4
SIZES = (1, 10, 100, 1000, 10_000, 100_000)
SPEC = ModelSpec(
    name="grows",
    n_layers=4,
    n_heads=1,
    kv_heads=1,
    head_dim=2,
    hidden=4,
    intermediate=4,
    vocab=1000,
    dtype="float32",
    max_model_len=1 << 24,
    block_tokens=16,
    segment_bytes=(1,),
    fingerprint="f",
)
"""A model whose blocks are a quarter of a page."""


class Caches:
    """Caches of two models on one device, one of which has so many blocks in use."""

    def __init__(self, blocks: int) -> None:
        self.moved = 0
        pages = 2 * (blocks // PER_PAGE + 4)
        vm = MemfdVm(PAGE, pages)
        pool = Pool(vm, pages)

        def move(source: int, target: int) -> None:
            self.moved += 1

        specs = (SPEC, replace(SPEC, name="gives"))
        self.one, self.other = (KvCache(spec, pool, vm, prefix=False, move=move) for spec in specs)
        self.table: list[int] = []
        self.grow(self.one, self.table, blocks)

    @staticmethod
    def grow(cache: KvCache, table: list[int], blocks: int) -> None:
        short = cache.grow(table, blocks * SPEC.block_tokens)
        assert short is None, short

    def resize(self, cache: KvCache, blocks: int) -> float:
        """Seconds to take memory for so many blocks, and to give it back."""
        table: list[int] = []
        began = time.thread_time()
        self.grow(cache, table, blocks)
        cache.free(table)
        return time.thread_time() - began

    def end(self) -> int:
        """Check the books; returns the blocks that were moved."""
        self.one.validate([self.table])
        self.other.validate([])
        self.one.free(self.table)
        return self.moved + self.one.book.relocations + self.other.book.relocations


def measure(blocks: int, rounds: int) -> dict[str, float]:
    caches = Caches(blocks)
    one = [caches.resize(caches.one, PER_PAGE) for _ in range(rounds)]
    turns = [
        caches.resize(cache, PER_PAGE)
        for _ in range(rounds)
        for cache in (caches.one, caches.other)
    ]
    caches.resize(caches.other, blocks)
    whole = caches.resize(caches.other, blocks)
    return {
        "us": 1e6 * statistics.median(one),
        "hand_over_us": 1e6 * statistics.median(turns),
        "us_per_page": 1e6 * whole / -(-blocks // PER_PAGE),
        "moved": caches.end(),
    }


def main() -> None:
    args = options(__doc__)
    rounds, sizes = (200, SIZES[:5]) if args.quick else (2000, SIZES)
    found = {blocks: measure(blocks, rounds) for blocks in sizes}
    result = {
        "blocks": {str(blocks): of for blocks, of in found.items()},
        "largest_over_smallest": found[sizes[-1]]["us"] / found[sizes[0]]["us"],
        "moved": sum(of["moved"] for of in found.values()),
    }
    finish(args, "resize", result)


if __name__ == "__main__":
    main()
