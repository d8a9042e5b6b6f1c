"""Choose between our linear kernel and oneDNN's, by number of rows: measured once per machine.

Used when models are built (`models.linears`, `models.fused.library`). A shape's choice is made when
a model with such a matrix is first loaded and is fixed for the life of the process, so that a job's
result never depends on when it runs; `choice_file` keeps it for other processes. Load on the
machine during measurement may lead to the slower kernel, never to a wrong result.
"""

from __future__ import annotations

import functools
import logging
import math
import sys
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from ballast.kernels import contest, onednn
from ballast.kernels.contest import MatrixShape, Timer
from ballast.kernels.linear_code import DOTS

if TYPE_CHECKING:
    # Where nothing is kept, as on GPUs, pydantic need not be there.
    from ballast.kernels.choice_file import ChoiceFile, KernelChoice

log = logging.getLogger(__name__)

ROWS = {
    torch.float32: (64, 128, 256, 512),
    torch.bfloat16: (2, 4, 8, 16, 32, 64, 128, 256, 512),
}
"""Numbers of rows from which oneDNN may take over; the last measurement stands for more rows.

In float32, below 64 rows, a row's result does not depend on the rows around it: oneDNN would bring
little there, and rounds differently for different numbers of rows. In bfloat16, whose products it
rounds once more, it begins where a stream is not alone.
"""
UNMEASURED = {torch.float32: 64, torch.bfloat16: 512 if DOTS and not onednn.has_tiles() else 8}
"""Rows from which oneDNN is used if nothing is measured, or nothing could be. Where both kernels
have the same instructions for bfloat16, ours was seen to be the faster one below some 500 rows."""
MARGIN = 1.05
"""Factor applied to oneDNN's time: near ties go to our kernel, whose results do not depend on the
number of rows."""
MOST_SECONDS = 6.0
"""Bound of a process's total time for measuring: a fleet of many shapes starts with `UNMEASURED`
for the rest, which later starts measure."""
MOST_RATIO = 2.0
"""Bound to which ratios are clipped."""


def decide(ratios: Mapping[int, float]) -> int | None:
    """Return the number of rows from which oneDNN is used, given its time over ours by rows.

    Minimises the product of the ratios from there on (of equals the greatest); None: never. Ratios
    are clipped to `MOST_RATIO`, so that one disturbed measurement does not decide.
    """
    best, least = None, 0.0
    total = 0.0
    for rows in sorted(ratios, reverse=True):
        ratio = min(max(ratios[rows], 1 / MOST_RATIO), MOST_RATIO)
        total += math.log(ratio * MARGIN)
        if total < least:
            best, least = rows, total
    return best


class Choices:
    """Choices of one process; used by any thread."""

    def __init__(self, file: ChoiceFile | None, timer: Timer = contest.seconds) -> None:
        """`file`: None: nothing is measured, and `UNMEASURED` applies."""
        self._file, self._timer = file, timer
        self._made: dict[MatrixShape, int | None] = {}
        self._spent = 0.0
        """Wall seconds spent on measuring."""
        self._lock = threading.Lock()

    def from_rows(self, shape: MatrixShape) -> int | None:
        """Return the rows from which oneDNN multiplies such a matrix; None: our kernel always does.

        Measures an unknown shape, with as many threads as the calling thread may use, which takes
        some tenths of a second.
        """
        with self._lock:
            if shape not in self._made:
                self._made[shape] = self._choose(shape)
            return self._made[shape]

    def _choose(self, shape: MatrixShape) -> int | None:
        described = onednn.describe(shape.n, shape.k, shape.dtype)
        if described is None or not described.panels:
            return None
        if self._file is None:
            return UNMEASURED[shape.dtype]
        name = name_of(shape)
        kept = self._file.find(name)
        if kept is not None and _allowed(kept, shape):
            return kept.from_rows
        if self._spent >= MOST_SECONDS:
            return UNMEASURED[shape.dtype]
        began = time.perf_counter()
        try:
            ratios = contest.ratios(shape, ROWS[shape.dtype], self._timer)
        except RuntimeError as error:
            log.warning("oneDNN is not used for %s: %s", name, error)
            return None
        except (OSError, MemoryError) as error:
            log.warning("%s: no memory to measure the faster kernel: %s", name, error)
            return UNMEASURED[shape.dtype]
        finally:
            self._spent += time.perf_counter() - began
        if len(ratios) < len(ROWS[shape.dtype]):
            log.warning("%s: this machine is too busy to measure the faster kernel", name)
            return UNMEASURED[shape.dtype]
        texts = {str(rows): round(ratio, 4) for rows, ratio in ratios.items()}
        from ballast.kernels.choice_file import KernelChoice

        chosen = KernelChoice(from_rows=decide(ratios), ratios=texts)
        chosen = self._file.keep(name, chosen, instead_of=kept)
        log.info("%s: oneDNN from %s rows on", name, chosen.from_rows)
        return chosen.from_rows if _allowed(chosen, shape) else None


def name_of(shape: MatrixShape) -> str:
    """Name of a shape in the file."""
    kind = str(shape.dtype).removeprefix("torch.")
    return f"{kind} {shape.n}x{shape.k}" + (" gated" if shape.gated else "")


def is_invariant(wanted: bool | None) -> bool:
    """Return whether rows in bfloat16 are multiplied independently of each other: as `wanted`;
    None: where our kernel, which does so, is hardly slower. That is on CPUs whose bfloat16
    instructions are those of both kernels, without tiles (AMX)."""
    return DOTS and not onednn.has_tiles() if wanted is None else wanted


def from_rows(
    n: int, k: int, dtype: torch.dtype, *, gated: bool = False, invariant: bool = False
) -> int:
    """Return the rows from which oneDNN multiplies (n, k) panels in this process, as
    `Choices.from_rows`; `NEVER` if our kernel always does, as it must where a row in bfloat16 is to
    be `invariant`: independent of the other rows. In float32, whose sums differ too little to
    change a token, oneDNN is used all the same.
    """
    if invariant and dtype == torch.bfloat16:
        return NEVER
    found = _choices().from_rows(MatrixShape(n, k, dtype, gated))
    return NEVER if found is None else found


NEVER = sys.maxsize


@functools.cache
def _choices() -> Choices:
    from ballast.kernels.choice_file import ChoiceFile

    return Choices(ChoiceFile.of_user())


def _allowed(choice: KernelChoice, shape: MatrixShape) -> bool:
    """Return whether a choice is valid for such a matrix: files can be edited."""
    return choice.from_rows is None or choice.from_rows in ROWS[shape.dtype]
