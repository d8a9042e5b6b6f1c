"""The file of choices: kept, shared, damaged, not to be written."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import time
from pathlib import Path

import pytest
import torch

from ballast.kernels import choice_file
from ballast.kernels.choice_file import FILE_NAME, VARIABLE, ChoiceFile, KernelChoice

SOME = KernelChoice(from_rows=16, ratios={"2": 1.5, "16": 0.75})
NEVER = KernelChoice(from_rows=None, ratios={})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "choices.json"


def test_what_is_kept_is_found(path: Path) -> None:
    file = ChoiceFile(path)
    assert file.find("a") is None
    assert file.keep("a", SOME) == SOME
    assert file.keep("b", NEVER) == NEVER
    assert ChoiceFile(path).find("a") == SOME
    assert ChoiceFile(path).find("b") == NEVER
    assert ChoiceFile(path).find("c") is None
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_the_first_that_was_kept_stays(path: Path) -> None:
    assert ChoiceFile(path).keep("a", SOME) == SOME
    assert ChoiceFile(path).keep("a", NEVER) == SOME
    assert ChoiceFile(path).keep("a", NEVER, instead_of=SOME) == NEVER
    assert ChoiceFile(path).find("a") == NEVER


def test_other_threads_cpus_and_libraries_have_their_own(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ChoiceFile(path).keep("a", SOME)
    with monkeypatch.context() as m:
        m.setattr(torch, "get_num_threads", lambda: 77)
        assert ChoiceFile(path).find("a") is None
        ChoiceFile(path).keep("a", NEVER)
        assert ChoiceFile(path).find("a") == NEVER
    assert ChoiceFile(path).find("a") == SOME
    here = ChoiceFile(path).here()
    assert [m.choices["a"] for m in here] == [SOME, NEVER]
    assert here[1].threads == 77
    for owner, name, value in (
        (choice_file, "cpu_facts", lambda: ("another", "avx2")),
        (torch, "__version__", "9.9"),
        (choice_file, "KERNELS", 10**6),
        (choice_file, "LANES", 4),
    ):
        with monkeypatch.context() as m:
            m.setattr(owner, name, value)
            assert ChoiceFile(path).find("a") is None
            assert ChoiceFile(path).here() == []
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
    assert ChoiceFile(path).find("a") is None


def test_those_measured_first_go(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice_file, "_MOST_MACHINES", 3)
    for threads in (1, 2, 3, 4):
        monkeypatch.setattr(torch, "get_num_threads", lambda n=threads: n)
        ChoiceFile(path).keep("a", SOME)
    assert [m.threads for m in ChoiceFile(path).here()] == [2, 3, 4]


def _damaged() -> dict[str, bytes]:
    entry = {"from_rows": 16, "ratios": {"2": 1.5}}
    machine = {"cpu": "c", "torch": "t", "threads": 2, "choices": {"a": entry}}
    bad = {
        "a later version": {"version": 2, "machines": {}},
        "no rows": {"version": 1, "machines": {"k": {**machine, "choices": {"a": {}}}}},
        "zero rows": {
            "version": 1,
            "machines": {"k": {**machine, "choices": {"a": {**entry, "from_rows": 0}}}},
        },
        "a text": {"version": 1, "machines": {"k": {**machine, "threads": "two"}}},
        "a list": [],
    }
    texts = {name: json.dumps(document).encode() for name, document in bad.items()}
    return {"cut": b'{"version": 1, "mach', "nothing": b"", "bytes": b"\xff\x00\x9f", **texts}


@pytest.mark.parametrize("damage", _damaged())
def test_a_damaged_file_is_ignored_and_replaced(
    path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    path.write_bytes(_damaged()[damage])
    assert ChoiceFile(path).find("a") is None
    assert str(path) in caplog.text
    assert ChoiceFile(path).here() == []
    assert ChoiceFile(path).keep("a", SOME) == SOME
    assert ChoiceFile(path).find("a") == SOME


def test_a_file_that_is_too_long_is_not_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ChoiceFile(path).keep("a", SOME)
    monkeypatch.setattr(choice_file, "_MOST_BYTES", 10)
    assert ChoiceFile(path).find("a") is None


def test_where_it_cannot_be_written_choices_hold_for_the_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file stands where the directory would be: for root as for anyone."""
    (tmp_path / "taken").write_text("")
    file = ChoiceFile(tmp_path / "taken" / "choices.json")
    assert file.find("a") is None
    assert file.keep("a", SOME) == SOME
    assert "measured anew" in caplog.text
    caplog.clear()
    assert file.keep("b", NEVER) == NEVER
    assert caplog.text == "", "once is enough"
    assert (tmp_path / "taken").read_text() == ""


def test_a_directory_that_somebody_keeps_locked(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    holder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(holder, fcntl.LOCK_EX)
        assert ChoiceFile(path).keep("a", SOME) == SOME
    finally:
        os.close(holder)
    assert not path.exists()


def test_nothing_is_kept_without_a_path() -> None:
    file = ChoiceFile(None)
    assert file.keep("a", SOME) == SOME
    assert file.find("a") is None


def _keep(path: Path, number: int) -> None:
    for i in range(10):
        ChoiceFile(path).keep(f"{number} {i}", SOME)


def test_writers_side_by_side_lose_nothing(path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_keep, args=(path, number)) for number in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    (machine,) = ChoiceFile(path).here()
    assert len(machine.choices) == 20


def test_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def placed() -> Path | None:
        file = ChoiceFile.of_user()
        assert file is not None
        return file._path

    for name in (VARIABLE, "NUMBA_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert placed() == tmp_path / ".cache" / "ballast" / FILE_NAME
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert placed() == tmp_path / ".cache" / "ballast" / FILE_NAME
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert placed() == Path("/x/ballast") / FILE_NAME
    monkeypatch.setenv("NUMBA_CACHE_DIR", "/kernels")
    assert placed() == Path("/kernels") / FILE_NAME
    monkeypatch.setenv(VARIABLE, "/some/file")
    assert placed() == Path("/some/file")
    monkeypatch.setenv(VARIABLE, "")
    assert ChoiceFile.of_user() is None
