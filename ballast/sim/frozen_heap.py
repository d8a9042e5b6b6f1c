"""Keep Python's full garbage collections out of what is measured live.

Used by `sim.calibrate` and `bench.replay`.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Collect garbage, then exempt all objects that are left from collections until the end; for
    good in a process whose heap is frozen already, as a server's is.

    A full collection takes 0.3 s where half a million objects are alive, as after imports and a few
    runs; an engine loop stands still meanwhile, and a client is late. `ballast serve` freezes its
    heap as well.
    """
    frozen = gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not frozen:
            gc.unfreeze()
