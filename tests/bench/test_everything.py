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

    def perform(run: Run, out: Path) -> int:
        commands.append(run.command)
        return 0

    monkeypatch.setattr(everything, "RUNS", (Run("pool"), Run("fleet", ("--quick",))))
    monkeypatch.setattr(everything, "perform", perform)
    monkeypatch.setattr(everything, "code_hash", lambda: "today")
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
    for code in ("today", "tomorrow", None, None):
        monkeypatch.setattr(everything, "code_hash", lambda code=code: code)
        call(monkeypatch, tmp_path)
    assert performed == 4 * ["pool", "fleet --quick"]


def test_none_starts_when_the_time_is_over(
    performed: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    call(monkeypatch, tmp_path, "--minutes", "0")
    assert not performed
