"""A team's threads, each on a CPU of its own: where the scheduler would put two of them on one."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from ballast.core.clock import VirtualClock
from ballast.core.event import Event, JobResult
from ballast.core.job import Job, SequenceWork
from ballast.kernels import team
from ballast.live.runner import CpuRunner

CPUS = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
pytestmark = pytest.mark.skipif(len(CPUS) < 2, reason="one CPU, or none that can be asked for")


def on_a_thread(call: Callable[[], object]) -> None:
    """A thread that is bound stays so; this process's others are not to be."""
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def bound() -> dict[int, set[int]]:
    """The CPUs of each of this process's threads that may not use all of them, by thread."""
    masks = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            mask = os.sched_getaffinity(int(task.name))
        except ProcessLookupError:
            continue  # it has ended since it was listed
        if mask != set(CPUS):
            masks[int(task.name)] = mask
    return masks


def bound_by(call: Callable[[], object]) -> list[set[int]]:
    """The CPUs of threads that a call has bound; others may end meanwhile."""
    before = bound()
    call()
    new = [mask for task, mask in bound().items() if before.get(task) != mask]
    return sorted(new, key=min)


def test_each_thread_of_a_team_gets_a_cpu() -> None:
    found: list[set[int]] = []

    def call() -> None:
        torch.set_num_threads(len(CPUS))
        found.extend(bound_by(lambda: team.bind(CPUS)))

    on_a_thread(call)
    assert found == [{cpu} for cpu in CPUS]
    assert os.sched_getaffinity(0) == set(CPUS)


def test_a_team_that_is_smaller_than_the_cpus_is_left_alone() -> None:
    found: list[list[set[int]]] = []

    def call() -> None:
        torch.set_num_threads(1)
        found.append(bound_by(lambda: team.bind(CPUS)))
        found.append(bound_by(lambda: team.bind(CPUS[:1])))

    on_a_thread(call)
    assert found == [[], []]


class Where:
    """An executor that notes where its threads may run."""

    def __init__(self) -> None:
        self.masks: list[set[int]] = []

    def run(self, work: Sequence[SequenceWork]) -> list[JobResult]:
        self.masks.append(os.sched_getaffinity(0))
        return []

    def stalled(self) -> float:
        return 0.0

    def carried(self) -> tuple[float, float]:
        return 0.0, 0.0


@pytest.mark.parametrize(
    ("lanes", "threads", "environment", "binds"),
    [
        (1, len(CPUS), {}, True),
        (2, len(CPUS), {}, False),
        (1, len(CPUS) - 1, {}, False),
        (1, len(CPUS), {"OMP_PROC_BIND": "false"}, False),
    ],
)
def test_the_only_lane_that_has_all_cpus_is_bound(
    lanes: int,
    threads: int,
    environment: dict[str, str],
    binds: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    models = [Where() for _ in range(lanes)]
    made = CpuRunner({"m": models}, events.put, VirtualClock(), threads, lanes)
    made.start(Job(1, 0, "m", (SequenceWork("r", (1,), 0, [0], None),)))
    events.get(timeout=240)
    made.close()
    assert models[0].masks == [{CPUS[0]} if binds else set(CPUS)]


def test_a_lane_follows_the_cpus_that_the_process_may_use() -> None:
    """As an operator changes them (`taskset -ap`), which binds every thread anew."""
    program = f"""
import os, queue
from tests.kernels.test_binding import CPUS, Where
from ballast.core.clock import VirtualClock
from ballast.core.job import Job, SequenceWork
from ballast.live.runner import PAUSE, CpuRunner
events, clock, model = queue.SimpleQueue(), VirtualClock(), Where()
made = CpuRunner({{"m": [model]}}, events.put, clock, {len(CPUS)})
def run(id):
    made.start(Job(id, 0, "m", (SequenceWork("r", (1,), 0, [0], None),)))
    events.get(timeout=240)
run(1)
for task in os.listdir("/proc/self/task"):
    os.sched_setaffinity(int(task), {{{CPUS[-1]}}})
clock.advance_to(10 * PAUSE)
run(2)
made.close()
print(model.masks)
"""
    free = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_P", "GOMP_"))}
    result = subprocess.run(
        [sys.executable, "-c", program], env=free, capture_output=True, text=True, check=False
    )
    assert result.stdout.strip() == str([{CPUS[0]}, {CPUS[-1]}]), result.stderr


def test_a_bound_thread_computes_what_an_unbound_one_does() -> None:
    torch.manual_seed(0)
    a, b = torch.rand(96, 64), torch.rand(64, 96)
    expected = a @ b
    found: list[torch.Tensor] = []

    def call() -> None:
        torch.set_num_threads(len(CPUS))
        team.bind(CPUS)
        found.append(a @ b)

    on_a_thread(call)
    assert torch.equal(found[0], expected)
