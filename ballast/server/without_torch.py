"""Keep PyTorch out of the server's process, where it would take most of the memory and start-up
time."""

from __future__ import annotations

import os
import sys


def forgo_torch() -> None:
    """Prevent this process from importing PyTorch: `transformers` then works without it, which
    includes all tokenizers and configurations.

    Has no effect where PyTorch has been imported already.
    """
    if "torch" not in sys.modules:
        os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # else it advises to install it
        sys.modules["torch"] = None  # type: ignore[assignment] # "not to be found", says Python
