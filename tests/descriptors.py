"""Which descriptors the tests' process has open."""

from __future__ import annotations

import gc
import os


def open_descriptors() -> set[str]:
    """Their numbers, without those that tests before have left to the garbage collector: it would
    close them at any moment, and a new file would get the number of one of them."""
    gc.collect()
    return set(os.listdir("/proc/self/fd"))
