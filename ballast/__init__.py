"""Ballast: many language models served from one elastic pool of device memory."""

import os

# Read by PyTorch's OpenMP runtime when it is loaded. By default its threads spin while they wait
# for each other; beside a server process, or anything else, on the same cores, a step then takes
# many times as long. Whoever has cores to spare may set `active`.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

__version__ = "0.1.0"
