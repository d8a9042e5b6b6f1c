"""Find this machine's GPUs and their memory in a child process, without initialising CUDA here.

Used when a server checks its machine. A process that has initialised CUDA cannot fork children that
use it, and importing the bindings would take longer than the probe.
"""

from __future__ import annotations

import subprocess
import sys

from ballast.core.errors import DeviceError

LIBRARY = "libcuda.so.1"
_SECONDS = 30.0
_PROBE = """
import ctypes, sys

try:
    cuda = ctypes.CDLL(sys.argv[1])
except OSError:
    sys.exit(f"the NVIDIA driver's {sys.argv[1]} is not installed")

def call(name, *arguments):
    code = getattr(cuda, name)(*arguments)
    if code:
        why = ctypes.c_char_p()
        cuda.cuGetErrorString(code, ctypes.byref(why))
        sys.exit(f"{name}: {(why.value or b'?').decode()} ({code})")

call("cuInit", 0)
count, device, size = ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
call("cuDeviceGetCount", ctypes.byref(count))
for i in range(count.value):
    call("cuDeviceGet", ctypes.byref(device), i)
    call("cuDeviceTotalMem_v2", ctypes.byref(size), device)
    print(size.value)
"""


def gpu_bytes(library: str = LIBRARY) -> list[int]:
    """Return the memory in bytes of each GPU that CUDA shows, by ordinal. Raises DeviceError if
    CUDA cannot be used, or does not answer within half a minute."""
    command = [sys.executable, "-I", "-S", "-c", _PROBE, library]
    try:
        completed = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        raise DeviceError("CUDA", f"no answer within {_SECONDS:g} seconds") from None
    if completed.returncode != 0:
        last = completed.stderr.strip().splitlines()[-1:] or [f"exit code {completed.returncode}"]
        raise DeviceError("CUDA", last[0])
    return [int(line) for line in completed.stdout.split()]
