"""Whatever a call does, it ends alone, and its caller learns why."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ballast.core.errors import (
    BrokenPromise,
    CheckpointError,
    ConfigError,
    DeviceError,
    LimitExceeded,
)
from ballast.core.units import MiB
from ballast.isolation.calls import Here
from ballast.isolation.limits import Limits
from ballast.isolation.zygote import Zygote, wait_for_exit

LIMITS = Limits(memory_bytes=256 * MiB, cpu_seconds=1, seconds=240.0)


@dataclass(frozen=True)
class Found:
    path: Path
    numbers: tuple[int, ...]
    text: str | None = None


def find(path: str) -> Found:
    return Found(Path(path), (1, 2, 3))


def process(unused: None) -> int:
    return os.getpid()


def fail(what: str) -> int:
    match what:
        case "checkpoint":
            raise CheckpointError("a file", None, "is broken")
        case "setting":
            raise ConfigError("dtype", 8, "allowed: auto")
        case "bug":
            raise KeyError("nobody foresaw this\nand it says a lot more")
        case "exit":
            os._exit(0)
        case "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "memory":
            held = [bytearray(16 * MiB) for _ in range(64)]
            return len(held)
        case "compute":
            while True:
                pass
        case "wait":
            threading.Event().wait()
    raise AssertionError(what)


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with Zygote.fork(limits=LIMITS) as zygote:
        yield zygote


@pytest.mark.parametrize("isolation", ["here", "zygote"])
def test_values_come_back_as_what_they_were(isolation: str, zygote: Zygote) -> None:
    how = Here() if isolation == "here" else zygote
    assert how.call(find, "/somewhere", Found) == Found(Path("/somewhere"), (1, 2, 3))


def test_each_call_has_a_process_of_its_own(zygote: Zygote) -> None:
    pids = {zygote.call(process, None, int) for _ in range(3)}
    assert len(pids) == 3
    assert os.getpid() not in pids


FAULTS = {
    "checkpoint": (CheckpointError, r"^a file: is broken$"),
    "setting": (ConfigError, r"^dtype: 8: allowed: auto$"),
    "bug": (BrokenPromise, r"^KeyError: 'nobody foresaw this\\nand it says a lot more'$"),
    "exit": (LimitExceeded, "without an answer"),
    "crash": (LimitExceeded, "SIGSEGV"),
    "memory": (LimitExceeded, "more than 256MiB of memory"),
    "compute": (LimitExceeded, "more than 1 s of processor time"),
}


@pytest.mark.parametrize("what", FAULTS)
def test_faults_end_alone_and_say_why(what: str, zygote: Zygote) -> None:
    kind, reason = FAULTS[what]
    with pytest.raises(kind, match=reason) as raised:
        zygote.call(fail, what, int)
    if isinstance(raised.value, ConfigError):
        assert (raised.value.key, raised.value.allowed) == ("dtype", "allowed: auto")
    assert zygote.call(find, "/", Found).numbers == (1, 2, 3)


def test_a_thread_has_ended_once_what_libraries_do_at_its_end_is_done() -> None:
    """MKL takes a lock then, which a process forked meanwhile would find held for ever."""
    libc = ctypes.CDLL(None)
    key = ctypes.c_uint()
    assert libc.pthread_key_create(ctypes.byref(key), libc.usleep) == 0

    def ends_late() -> None:
        libc.pthread_setspecific(key, ctypes.c_void_p(300_000))  # microseconds, for `usleep`

    thread = threading.Thread(target=ends_late)
    thread.start()
    wait_for_exit(thread)
    assert not Path(f"/proc/self/task/{thread.native_id}").exists()


def test_a_call_that_waits_ends_by_the_clock() -> None:
    with Zygote.fork(limits=Limits(seconds=0.2)) as zygote:
        with pytest.raises(LimitExceeded, match=r"not done after 0\.2 s"):
            zygote.call(fail, "wait", int)
        assert children_of(zygote._pid) == [], "the call goes on"


def test_without_its_zygote_a_call_fails() -> None:
    zygote = Zygote.fork(limits=LIMITS)
    os.kill(zygote._pid, signal.SIGKILL)
    with pytest.raises(DeviceError, match="gone"):
        zygote.call(process, None, int)
    zygote.close()
    zygote.close()


def children_of(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


def test_a_zygote_that_ends_leaves_no_child() -> None:
    zygote = Zygote.fork(limits=LIMITS)
    calling = threading.Thread(target=_call_in_vain, args=(zygote,))
    calling.start()
    while not (children := children_of(zygote._pid)):
        time.sleep(0.01)
    (child,) = children
    ended = os.pidfd_open(child)
    os.kill(zygote._pid, signal.SIGKILL)
    calling.join()
    zygote.close()
    assert select.select([ended], [], [], 240)[0]
    os.close(ended)


def _call_in_vain(zygote: Zygote) -> None:
    with pytest.raises(DeviceError):
        zygote.call(fail, "wait", int)
