"""Kernels of CPUs with fewer instructions than this one: their tests, compiled for those."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from llvmlite import binding

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
AVX2 = "+sse3,+ssse3,+sse4.1,+sse4.2,+popcnt,+avx,+avx2,+fma,+f16c,+bmi,+bmi2"
FEATURES = {
    "AVX2": AVX2,
    "AVX-512 without VNNI": f"{AVX2},+avx512f,+avx512bw,+avx512vl,+avx512dq,+avx512cd",
}
HAS = {
    "AVX2": "LANES == 8 and dots._BYTES and not dots._VNNI",
    "AVX-512 without VNNI": "LANES == 16 and not dots._BYTES and not dots._VNNI",
}
CHECK = (
    "from ballast.kernels import quantised_dots_code as dots; from ballast.kernels.vector_code "
    "import LANES; assert {}"
)
TESTS = ("test_quantised.py", "test_experts.py", "test_linear.py")


@pytest.mark.parametrize("instructions", FEATURES)
def test_kernels_compute_the_same(instructions: str, tmp_path: Path) -> None:
    here, features = binding.get_host_cpu_features(), FEATURES[instructions]
    lacking = [f for f in features.replace("+", "").split(",") if not here.get(f)]
    if lacking:
        pytest.skip(f"this CPU has no {', '.join(lacking)}")
    environment = {
        **os.environ,
        "NUMBA_CPU_NAME": "haswell",
        "NUMBA_CPU_FEATURES": features,
        "NUMBA_CACHE_DIR": str(tmp_path),
    }

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        given = [sys.executable, *arguments]
        return subprocess.run(
            given, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )

    compiled = run("-c", CHECK.format(HAS[instructions]))
    assert compiled.returncode == 0, compiled.stderr
    found = run("-m", "pytest", "-q", "-x", *(f"tests/kernels/{name}" for name in TESTS))
    assert found.returncode == 0, found.stdout[-3000:]
