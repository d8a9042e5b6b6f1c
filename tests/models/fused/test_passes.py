"""Passes: operations in order, and stops where they are due."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import pytest
import torch

from ballast.kernels import layer, layer_code
from ballast.models.fused.passes import Due, End, PassStop, PlannedPass

LAYERS = 3
OPERATIONS = 2 + 4 * LAYERS
"""Of a pass as `described`: a first one, four of each layer, a last one."""


class Steps:
    """Operations that each mark that they have run, and how far they were at each stop."""

    def __init__(self) -> None:
        self.marks = np.zeros(OPERATIONS, np.float32)
        self.one = np.ones(1, np.float32)
        targets = self.marks.ctypes.data + 4 * np.arange(OPERATIONS)
        self.tables = layer.tables(
            OPERATIONS, width=1, rows=1, source=self.one.ctypes.data, target=targets
        )
        self.met: list[tuple[PassStop, int]] = []

    def meet(self, stop: PassStop) -> None:
        done = int(self.marks.sum())
        assert self.marks[:done].tolist() == [1.0] * done, "not in order, or not once"
        self.met.append((stop, done))

    def run(self, planned: PlannedPass, end: End, heeded: Collection[int] = ()) -> int:
        """Operations that ran."""
        self.marks[:] = 0
        self.tables[:, layer_code.NEXT] = 0
        self.met.clear()
        places = [3 + 4 * i for i in range(LAYERS)]
        planned.set_attention(layer.kernel("add", torch.float32), self.tables[places])
        self._attending = self.tables[places]
        planned.set_attention(layer.kernel("add", torch.float32), self._attending)
        planned.run(end, 2, heeded, self.meet)
        done = int(self.marks.sum())
        assert self.marks[:done].tolist() == [1.0] * done
        return done


def described(steps: Steps, *, library: bool = False) -> PlannedPass:
    """As of a model of three layers whose second operation, and the last, may be a library's."""
    planned, add = PlannedPass(), layer.kernel("add", torch.float32)
    planned.operation(add, steps.tables, 0)
    for i in range(LAYERS):
        at = 1 + 4 * i
        planned.stop(Due.WAIT, i)
        planned.operation(add, steps.tables, at)
        if library:
            planned.stop(Due.LIBRARY, i, "qkv")
        planned.operation(add, steps.tables, at + 1)
        planned.end(End.KV)
        planned.attention()
        planned.operation(add, steps.tables, at + 3)
        planned.stop(Due.USED, i)
    planned.end(End.NORM)
    if library:
        planned.stop(Due.LIBRARY, 0, "head")
    planned.operation(add, steps.tables, OPERATIONS - 1)
    planned.end(End.HEAD)
    return planned


@pytest.fixture
def steps() -> Steps:
    return Steps()


def test_without_stops_it_is_one_program_up_to_its_end(steps: Steps) -> None:
    planned = described(steps)
    for _ in range(2):
        assert steps.run(planned, End.HEAD) == OPERATIONS
        assert steps.run(planned, End.NORM) == OPERATIONS - 1
        assert steps.run(planned, End.KV) == OPERATIONS - 3
        assert steps.met == []
    assert len(planned._programs) == 3


def test_a_library_is_called_between_programs(steps: Steps) -> None:
    planned = described(steps, library=True)
    qkv = [(PassStop(Due.LIBRARY, i, "qkv"), 2 + 4 * i) for i in range(LAYERS)]
    assert steps.run(planned, End.KV) == OPERATIONS - 3
    assert steps.met == qkv
    assert steps.run(planned, End.NORM) == OPERATIONS - 1
    assert steps.met == qkv, "the head is not due, though it stands where the pass ends"
    assert steps.run(planned, End.HEAD) == OPERATIONS
    assert steps.met == [*qkv, (PassStop(Due.LIBRARY, 0, "head"), OPERATIONS - 1)]


@pytest.mark.parametrize("library", [False, True])
@pytest.mark.parametrize("heeded", [(0,), (1,), (2,), (0, 2), (0, 1, 2)])
def test_layers_that_come_and_go(steps: Steps, library: bool, heeded: tuple[int, ...]) -> None:
    planned = described(steps, library=library)
    for end, last in ((End.HEAD, 1 + 4 * LAYERS), (End.KV, OPERATIONS - 3)):
        steps.run(planned, end, heeded)
        found = [(s.due, s.layer, done) for s, done in steps.met if s.due is not Due.LIBRARY]
        expected = []
        for i in heeded:
            expected.append((Due.WAIT, i, 1 + 4 * i))
            expected.append((Due.USED, i, min(5 + 4 * i, last)))
        assert found == expected
        assert len(steps.met) - len(found) == library * (LAYERS + (end is End.HEAD))
        steps.run(planned, end)
        assert all(s.due is Due.LIBRARY for s, _ in steps.met), "only where it is said"
