"""What other processes take is seen."""

from __future__ import annotations

import subprocess
import sys
import time

from ballast.bench.machine_load import DISTURBED, OtherLoad, disturbance

SPIN = "import time\nend = time.process_time() + 0.5\nwhile time.process_time() < end: pass"


def test_a_child_is_another() -> None:
    began = time.monotonic()
    with OtherLoad() as others, OtherLoad(children=False) as strangers:
        subprocess.run([sys.executable, "-c", SPIN], check=True)
    seconds = time.monotonic() - began
    # The kernel counts in hundredths of a second.
    assert others.cores * seconds > 0.4
    assert (others.cores - strangers.cores) * seconds > 0.4


def test_what_disturbs_a_measurement_is_told() -> None:
    others = OtherLoad()
    assert disturbance(others) is None
    others.cores = DISTURBED
    assert disturbance(others) is None
    others.cores = 1.25
    warning = disturbance(others)
    assert warning == "other processes took 1.2 cores meanwhile: measure again when idle"
