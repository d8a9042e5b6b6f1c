"""All benchmarks as one run in several calls: what has ended on the same code is not run again."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import everything
from benchmarks.everything import Run


@pytest.fixture
def performed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Commands that were run, in order; nothing is."""
    commands: list[str] = []

    def perform(run: Run, out: Path, keep: Path | None) -> int:
        commands.append(run.command)
        return 0

    monkeypatch.setattr(everything, "RUNS", (Run("pool"), Run("fleet", ("--quick",))))
    monkeypatch.setattr(everything, "perform", perform)
    monkeypatch.setattr(everything, "code_hash", lambda name, root: "today")
    return commands


def call(monkeypatch: pytest.MonkeyPatch, out: Path, *options: str) -> None:
    monkeypatch.setattr("sys.argv", ["everything", "--out", str(out), *options])
    with pytest.raises(SystemExit) as ended:
        everything.main()
    assert ended.value.code == 0


def test_a_second_call_goes_on_where_the_first_ended(
    performed: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    call(monkeypatch, tmp_path, "--only", "pool")
    call(monkeypatch, tmp_path)
    assert performed == ["pool", "fleet --quick"]
    call(monkeypatch, tmp_path, "--again", "--only", "pool")
    assert performed[2:] == ["pool"]


def test_other_code_begins_anew(
    performed: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for code in ("today", "tomorrow", "today"):
        monkeypatch.setattr(everything, "code_hash", lambda name, root, code=code: code)
        call(monkeypatch, tmp_path)
    assert performed == 3 * ["pool", "fleet --quick"]


def test_none_starts_when_the_time_is_over(
    performed: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    call(monkeypatch, tmp_path, "--minutes", "0")
    assert not performed


def test_one_is_chosen_by_its_benchmark_or_by_its_result(
    performed: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    runs = (Run("fleet", ("--parts", "one")), Run("fleet", ("--parts", "two")))
    monkeypatch.setattr(everything, "RUNS", runs)
    call(monkeypatch, tmp_path, "--only", "fleet-parts-two")
    assert performed == ["fleet --parts two"]
    call(monkeypatch, tmp_path, "--only", "fleet")
    assert performed[1:] == ["fleet --parts one"]


def test_what_is_timed_is_left_out_where_other_work_runs(
    performed: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(everything, "RUNS", (Run("pool"), Run("prism_sim", timed=False)))
    call(monkeypatch, tmp_path, "--untimed")
    assert performed == ["prism_sim"]


def test_calls_that_run_beside_each_other_keep_each_others_records(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(everything, "RUNS", (Run("pool"), Run("fleet")))
    monkeypatch.setattr(everything, "code_hash", lambda name, root: "today")
    commands: list[str] = []

    def perform(run: Run, out: Path, keep: Path | None) -> int:
        commands.append(run.command)
        if run.name == "pool":  # meanwhile another call runs the other
            call(monkeypatch, tmp_path, "--only", "fleet")
        return 0

    monkeypatch.setattr(everything, "perform", perform)
    call(monkeypatch, tmp_path, "--only", "pool")
    call(monkeypatch, tmp_path)
    assert commands == ["pool", "fleet"]


def test_what_was_measured_before_a_failure_is_kept_for_the_same_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(everything, "RUNS", (Run("pool", resumes=True), Run("fleet")))
    monkeypatch.setattr(everything, "code_hash", lambda name, root: "today")
    found: list[str] = []

    def perform(run: Run, out: Path, keep: Path | None) -> int:
        if keep is None:
            assert run.name == "fleet"
            return 0
        found.append(keep.read_text() if keep.exists() else "")
        keep.write_text(found[-1] + "measured ")
        if found == [""]:
            raise KeyboardInterrupt
        return 0

    monkeypatch.setattr(everything, "perform", perform)
    monkeypatch.setattr("sys.argv", ["everything", "--out", str(tmp_path)])
    with pytest.raises(KeyboardInterrupt):
        everything.main()
    call(monkeypatch, tmp_path)
    call(monkeypatch, tmp_path, "--again")
    assert found == ["", "measured ", ""]
    assert not list((tmp_path / "kept").iterdir())
    (tmp_path / "kept" / "pool-today").mkdir()
    monkeypatch.setattr(everything, "code_hash", lambda name, root: "tomorrow")
    call(monkeypatch, tmp_path)
    assert found[3:] == [""]
    assert not list((tmp_path / "kept").iterdir())
