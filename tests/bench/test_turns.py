"""Engines that take turns, and what is measured of them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.turns import WAIT_POLICY, Broken, Contestant, Step, contest, measured

CHILD = """
import signal, sys, time
from benchmarks.child import serve

continued = []
signal.signal(signal.SIGCONT, lambda *_: continued.append(1))

def load():
    if sys.argv[1] == "unloadable":
        raise ValueError("no such model")
    def run(prompts, new_tokens):
        if sys.argv[1] == "failing":
            raise ValueError("no such kernel")
        times = [[] for _ in prompts]
        turn = len(continued)
        for i in range(new_tokens):
            while sys.argv[1] == "good" and 2 * i == new_tokens and len(continued) == turn:
                time.sleep(0.001)  # the second half is of another turn
            end = time.process_time() + 0.01
            while time.process_time() < end:
                pass
            now = time.perf_counter()
            for stream in times:
                stream.append(now)
        print("not an answer")
        return times
    return run, {"kind": sys.argv[1]}

serve(load)
"""
PROMPTS = [[1, 2, 3], [4, 5, 6]]


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "fake_child.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path / "log"


def test_other_engines_do_not_inherit_what_ballast_sets_for_itself() -> None:
    asked = (
        "import os, ballast, benchmarks.turns as turns\n"
        "own = os.environ[turns.WAIT_POLICY]\n"
        "print(own, turns.users_environment().get(turns.WAIT_POLICY))"
    )
    plain = {k: v for k, v in os.environ.items() if k != WAIT_POLICY}
    plain["PYTHONPATH"] = str(Path(__file__).parents[2])
    for given, printed in (({}, "passive None"), ({WAIT_POLICY: "active"}, "active active")):
        command = (sys.executable, "-c", asked)
        assert (
            subprocess.check_output(command, env={**plain, **given}, text=True).strip() == printed
        )


def process_state(c: Contestant) -> str:
    stat = Path(f"/proc/{c._process.pid}/stat").read_text()
    return stat.rpartition(")")[2].split()[0]


def test_time_between_turns_does_not_count() -> None:
    # It computes in 10..12 and 20..23; stream 1 gets its first token a step after stream 0.
    turns = [(10.0, 12.0, 0), (20.0, 23.0, 1)]
    times = [[11.0, 11.5, 20.5, 21.0, 22.0], [11.5, 20.5, 21.0, 22.0, 22.5]]
    run = measured(10.5, times, turns, prompt_tokens=6)
    assert (run.streams, run.prompt_tokens, run.new_tokens) == (2, 6, 10)
    assert run.prefill == 1.0
    assert run.seconds == 4.0
    # From stream 1's first token to stream 0's last; the first of these was cut by the pause.
    assert run.steps == (Step(1, 1.0), Step(1, 0.5), Step(1, 1.0))


def test_a_contestant_computes_in_its_turns_alone(log: Path) -> None:
    with Contestant("a", "fake_child", ["good"], log) as c:
        assert c.facts == {"kind": "good"}
        assert process_state(c) == "T"
        stop, late = c._stop, list[float]()

        def timed_stop() -> float:
            asked = stop()
            late.append(time.perf_counter() - asked)
            return asked

        c._stop = timed_stop  # type: ignore[method-assign]
        c.ask(PROMPTS, 8)
        turns = 1
        while (run := c.turn(0.03)) is None:
            assert process_state(c) == "T"
            turns += 1
        assert turns > 1
        assert not c.busy
        assert run.new_tokens == 16
        assert len(run.steps) == 7
        # No less than it computed (8 times 10 ms, but for when a clock was read, and for what it
        # did between being told to stop and stopping), and no more than its turns.
        assert 0.075 - sum(late) <= run.seconds <= sum(end - begin for begin, end, _ in c._turns)
    assert log.read_text() == "not an answer\n"


def test_all_run_as_often_as_asked(log: Path) -> None:
    rounds = []
    with (
        Contestant("a", "fake_child", ["a"], log) as a,
        Contestant("b", "fake_child", ["b"], log) as b,
    ):
        slices = {"a": 0.02, "b": 0.1}
        taken = contest([a, b], PROMPTS, 4, slices, lambda: rounds.append(len(rounds)), runs=2)
    assert [len(runs) for runs in taken.values()] == [2, 2]
    last = max(s.turn for runs in taken.values() for r in runs for s in r.steps)
    assert last <= rounds[-1]


def test_who_fails_says_why(log: Path) -> None:
    with pytest.raises(Broken, match="a: ValueError: no such model"):
        Contestant("a", "fake_child", ["unloadable"], log)
    with Contestant("b", "fake_child", ["failing"], log) as b:
        b.ask(PROMPTS, 1)
        with pytest.raises(Broken, match="b: ValueError: no such kernel"):
            b.turn(60.0)
    with pytest.raises(Broken, match="c: ended with code 1"):
        Contestant("c", "no_such_module", [], log)
