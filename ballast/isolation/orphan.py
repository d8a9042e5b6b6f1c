"""Have the kernel kill a process when its parent process ends.

Called at the start of workers, rank processes, the zygote, and the children that it and the
renderer of chat templates fork.
"""

from __future__ import annotations

import ctypes
import os
import signal

from ballast.core.errors import DeviceError

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Have the kernel kill this process when `parent`, which started it, ends.

    Raises DeviceError if the kernel refuses. Exits at once if `parent` has ended already.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise DeviceError("prctl(PR_SET_PDEATHSIG)", os.strerror(ctypes.get_errno()))
    # The parent may have ended before the call: then the signal will never come.
    if os.getppid() != parent:
        os._exit(1)
