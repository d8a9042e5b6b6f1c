"""What other processes take is seen."""

from __future__ import annotations

import subprocess
import sys
import time

from ballast.bench.others import Others

SPIN = "import time\nend = time.process_time() + 0.5\nwhile time.process_time() < end: pass"


def test_a_child_is_another() -> None:
    with Others() as others:
        began = time.monotonic()
        subprocess.run([sys.executable, "-c", SPIN], check=True)
        seconds = time.monotonic() - began
    # The kernel counts in hundredths of a second.
    assert others.cores * seconds > 0.4
