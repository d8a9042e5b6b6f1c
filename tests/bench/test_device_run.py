"""What a run in this process needs before it begins."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ballast.bench.device_run import run_live
from ballast.core.errors import Unavailable
from ballast.workload.workload import Workload, WorkloadRequest
from tests.live.test_live_device import fleet, paths  # noqa: F401


def test_a_model_that_cannot_be_served_is_named(paths: dict[str, Path], tmp_path: Path) -> None:  # noqa: F811
    served = fleet(paths)
    broken = replace(served.models[0], name="broken", path=str(tmp_path))
    served = replace(served, models=(*served.models, broken))
    request = WorkloadRequest(id=0, at=0.0, model="broken", prompt_tokens=3, output_tokens=2)
    with pytest.raises(Unavailable, match="broken is not served"):
        run_live(served, Workload.of("w", [request]), {})
