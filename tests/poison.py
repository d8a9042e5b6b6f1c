"""A checking mode of pools of real memory: pages that a KV cache gives back are filled with NaN.

KV is found by page number, and no page of it is ever unmapped: a stale block number is no fault.
So whatever still reads a page that was given back computes NaN, for which its request fails, and
what still writes there is found when the page is taken again. `tests/conftest.py` turns it on.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

from ballast.core.actions import Short
from ballast.memory.pool import Pool, _Reclaim
from ballast.memory.tensor import array_at
from ballast.memory.vm_memfd import MemfdVm

POISON = 0xFF
"""Each byte of a page: NaN in float32 and in bfloat16."""
_poisoned: WeakKeyDictionary[Pool, set[int]] = WeakKeyDictionary()


def poison_freed_kv() -> None:
    """Have all pools do so from now on."""
    end, pick = Pool._end, Pool._pick

    def end_poisoned(pool: Pool, entry: _Reclaim) -> None:
        if isinstance(pool.vm, MemfdVm) and entry.owner.startswith("kv:"):
            for page in entry.pages:
                if pool.free_pages.has_memory[page]:
                    _bytes(pool, page)[:] = POISON
                    _poisoned.setdefault(pool, set()).add(page)
        end(pool, entry)

    def pick_checked(
        pool: Pool, owner: str, n: int, bare: bool, near: int | None
    ) -> tuple[int, ...] | Short | None:
        pages = pick(pool, owner, n, bare, near)
        if isinstance(pages, tuple) and pool in _poisoned:
            for page in _poisoned[pool].intersection(pages):
                _poisoned[pool].remove(page)
                if not pool.free_pages.has_memory[page]:
                    continue  # it went back to the machine
                found = _bytes(pool, page)
                whole = (found == POISON).all() or not found.any()  # zeros: it was populated anew
                assert whole, f"page {page} was written on while nobody had it"
        return pages

    Pool._end = end_poisoned  # type: ignore[method-assign]
    Pool._pick = pick_checked  # type: ignore[method-assign]


def _bytes(pool: Pool, page: int):  # type: ignore[no-untyped-def]
    vm = pool.vm
    return array_at(vm.window.address(page), (vm.page_bytes,), "uint8")
