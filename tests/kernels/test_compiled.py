"""Kernels are compiled where nothing can be written, too; that is said once."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ballast.bench import doctor_machine
from ballast.bench.doctor_finding import Verdict
from ballast.kernels import choice_file
from ballast.kernels import compiled as kernels_compiled
from ballast.kernels.choice_file import ChoiceFile, KernelChoice
from ballast.kernels.compile_beside import KERNELS
from ballast.kernels.compiled import digest_of, keep_only

COMPILES = """
import logging, sys
logging.basicConfig(level=logging.WARNING)
from ballast.kernels.compiled import cache_directory, compiled, is_kept
from ballast.kernels import sampling
from numba import types, njit

def kernel(address):
    pass

def other(address):
    pass

for made in (kernel, other):
    assert compiled(types.void(types.int64), made).address
assert sampling.philox(1, 2, 3, 4, 5, 6)
print(is_kept(), cache_directory())
"""
NOWHERE = {
    "NUMBA_CACHE_DIR": "/dev/null/numba",
    "NUMBA_CACHE_LOCATOR_CLASSES": "UserProvidedCacheLocator",
}
"""As where the package, which a test cannot make read only for root, cannot be written either."""


def run(tmp_path: Path, **environ: str) -> tuple[str, str]:
    script = tmp_path / "compiles.py"
    script.write_text(COMPILES)
    path = {"PYTHONPATH": str(Path(__file__).parents[2])}
    ended = subprocess.run(
        (sys.executable, str(script)),
        env={**os.environ, **path, **environ},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip(), ended.stderr


def test_kernels_are_compiled_without_a_place_to_keep_them(tmp_path: Path) -> None:
    printed, log = run(tmp_path, **NOWHERE, HOME="/dev/null")
    assert printed == "False None"
    assert log.count("kernels are compiled anew at each start") == 1
    assert "Traceback" not in log
    kept = tmp_path / "kept"
    printed, log = run(tmp_path, NUMBA_CACHE_DIR=str(kept))
    assert printed.startswith(f"True {kept}")
    assert "anew" not in log
    assert any(kept.rglob("*.nbc"))


def test_choices_are_made_without_a_place_to_keep_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "below.json", Path("/dev/null/below/it.json")):
        caplog.clear()
        file = ChoiceFile(path)
        assert file.fault() is not None
        chosen = KernelChoice(from_rows=4, ratios={})
        for shape in ("a", "b"):
            assert file.find(shape) is None
            assert file.keep(shape, chosen) == chosen
        assert caplog.text.count("kernels are measured anew at each start") == 1
    assert ChoiceFile(tmp_path / "new" / "deep" / "file.json").fault() is None


def test_the_doctor_says_what_can_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(choice_file.VARIABLE, str(tmp_path / "choices.json"))
    monkeypatch.setattr(doctor_machine, "cache_directory", lambda: tmp_path)
    found = doctor_machine.caches()
    assert found.verdict is Verdict.OK
    assert str(tmp_path / "choices.json") in found.found
    monkeypatch.setenv(choice_file.VARIABLE, "/dev/null/choices.json")
    found = doctor_machine.caches()
    assert found.verdict is Verdict.WARN
    assert "/dev/null is no directory" in found.found
    assert "NUMBA_CACHE_DIR" in found.cure
    monkeypatch.delenv(choice_file.VARIABLE)
    monkeypatch.setattr(doctor_machine, "cache_directory", lambda: None)
    assert "no place for compiled kernels" in doctor_machine.caches().found


def test_code_of_other_sources_is_removed(tmp_path: Path) -> None:
    """A kernel's own file may be as it was, and a function that it calls another."""
    sources, kept = tmp_path / "sources", tmp_path / "kept"
    sources.mkdir()
    kept.mkdir()
    (sources / "kernel.py").write_text("a")
    callee = sources / "callee.py"
    callee.write_text("b")
    before = digest_of(sources.glob("*.py"))
    assert not keep_only(kept, before)
    for name in ("kernel.nbi", "kernel.1.nbc", "other.py"):
        (kept / name).touch()
    assert keep_only(kept, digest_of(sources.glob("*.py")))
    assert len(list(kept.glob("kernel.*"))) == 2
    callee.write_text("c")
    after = digest_of(sources.glob("*.py"))
    assert after != before
    assert not keep_only(kept, after)
    assert not list(kept.glob("*.nb*"))
    assert (kept / "other.py").exists()


def test_a_kernel_is_compiled_by_one_process_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others wait for its lock, and find the code kept."""

    def held() -> bool:
        (file,) = tmp_path.glob("*.lock")
        with file.open("ab") as other:
            try:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    seen: list[bool] = []

    def compiling(signature: object, kernel: object, *, kept: bool) -> str:
        assert kept
        seen.append(held())
        return "code"

    monkeypatch.setattr(kernels_compiled, "cache_directory", lambda: tmp_path)
    monkeypatch.setattr(kernels_compiled, "is_kept", lambda: True)
    monkeypatch.setattr(kernels_compiled, "_c_function", compiling)
    assert kernels_compiled.compiled("void(int64)", test_code_of_other_sources_is_removed) == "code"
    assert seen == [True]
    assert not held()


KEPT = """
import ctypes, sys
from ballast.kernels.stream_copy import LEAST_BYTES, stream_copier

source, target = ((ctypes.c_char * LEAST_BYTES)() for _ in range(2))
source[:3] = b"abc"
stream_copier()(ctypes.addressof(target), ctypes.addressof(source), LEAST_BYTES)
assert bytes(target) == bytes(source)
print("numba.np.linalg" in sys.modules)
"""


def test_kept_code_is_loaded_without_what_compiles(tmp_path: Path) -> None:
    """Numba would import half of itself, and SciPy, before it looks at its cache."""
    environ = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "NUMBA_CACHE_DIR": str(tmp_path),
    }
    for compiles in ("True", "False"):
        command = (sys.executable, "-c", KEPT)
        out = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240)
        assert (out.stdout.strip(), out.stderr) == (compiles, "")


BESIDE = """
from pathlib import Path
from ballast.kernels import compile_beside
from ballast.kernels.compiled import cache_directory

began = compile_beside.begin(["write_float32"])
code = [child.wait(200) for child in compile_beside._begun]
print(began, code, len(list(cache_directory().glob("*write_float32*.nbc"))))
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core alone")
def test_a_process_compiles_beside_the_first_that_finds_nothing_kept(tmp_path: Path) -> None:
    environ = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "NUMBA_CACHE_DIR": str(tmp_path),
    }
    command = (sys.executable, "-c", BESIDE)
    for printed in ("True [0] 1", "False [] 1"):
        out = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240)
        assert (out.stdout.strip(), out.stderr) == (printed, "")


def test_it_ends_with_the_process_that_began_it(tmp_path: Path) -> None:
    """Its standard input is closed then."""
    command = (sys.executable, "-m", "ballast.kernels.compile_beside", *KERNELS)
    environ = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "NUMBA_CACHE_DIR": str(tmp_path),
    }
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=environ) as child:
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait(240) == 1
