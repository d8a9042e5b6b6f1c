"""A child that reads untrusted data can read files, and no more, whatever code runs in it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from ballast.isolation import confinement
from ballast.isolation.zygote import Zygote
from tests.isolation.attempts import ATTEMPTS, succeeding

pytestmark = pytest.mark.skipif(
    bool(confinement.missing()), reason="this kernel has no seccomp, or no Landlock"
)
UNPRIVILEGED = 65534


def attempt(name: str) -> bool:
    return bool(succeeding(os.getppid(), 9, [name]))


def work(unused: None) -> int:
    """What parsers do: threads, memory, files that are read, a fork."""
    found: list[int] = []
    threads = [threading.Thread(target=found.append, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    held = bytearray(64 << 20)
    with open(__file__, "rb") as file:
        text = file.read()
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    return len(found) if text and held and status == 0 else -1


@pytest.mark.parametrize("name", ATTEMPTS)
def test_a_zygotes_child_can(name: str) -> None:
    with Zygote.fork() as zygote:
        assert not zygote.call(attempt, name, bool)
        assert zygote.call(work, None, int) == 4


AS_A_WORKER = """
import os, socket, tempfile, threading
from ballast.isolation.confinement import confine_worker
from tests.isolation.attempts import DENIED_TO_WORKERS, succeeding
go, found = threading.Event(), []
def attempt():
    go.wait()
    found.append(succeeding(os.getppid(), 9, DENIED_TO_WORKERS))
threads = [threading.Thread(target=attempt) for _ in range(2)]  # they are there already
for thread in threads:
    thread.start()
confine_worker()
threads.append(threading.Thread(target=attempt))
threads[-1].start()
go.set()
for thread in threads:
    thread.join()
a, b = socket.socketpair()
socket.socket(socket.AF_UNIX).close()
with tempfile.TemporaryFile() as file, open(os.memfd_create("m"), "r+b") as memory:
    file.write(b"x"), memory.truncate(4096)
os.kill(os.getpid(), 0), os.sched_setaffinity(0, os.sched_getaffinity(0))
os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
print(found)
"""


def test_all_threads_of_a_worker_are_confined_and_can_do_their_work() -> None:
    done = subprocess.run((sys.executable, "-c", AS_A_WORKER), capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[[], [], []]\n", "")


TRY = """
import ctypes, os
from ballast.isolation.confinement import confine
from tests.isolation.attempts import succeeding
os.setgroups([]), os.setresgid({0}, {0}, {0}), os.setresuid({0}, {0}, {0})
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # a process that changes its user is concealed at first
pid = os.fork()
if pid == 0:
    confine()
    print(succeeding(os.getppid(), 9), flush=True)
    os._exit(0)
os.waitpid(pid, 0)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="root alone can become another user")
def test_a_user_without_privileges_is_confined_as_root_is() -> None:
    command = (sys.executable, "-c", TRY.format(UNPRIVILEGED))
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


CONCEAL = """
import ctypes, os
from ballast.isolation.confinement import conceal_memory
os.setgroups([]), os.setresgid({0}, {0}, {0}), os.setresuid({0}, {0}, {0})
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # a process that changes its user is concealed at first
def readable():
    pid = os.fork()
    if pid == 0:
        ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)
        try:
            open(f"/proc/{{os.getppid()}}/environ").read()
        except PermissionError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1] == 0
before = readable()
conceal_memory()
print(before, readable())
"""


@pytest.mark.skipif(os.getuid() != 0, reason="root alone can become another user")
def test_a_server_conceals_its_memory_from_processes_of_its_user() -> None:
    command = (sys.executable, "-c", CONCEAL.format(UNPRIVILEGED))
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "True False\n"
