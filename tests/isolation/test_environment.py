"""Children get what libraries read of the environment, and none of its secrets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import ballast
from ballast.isolation.environment import child_environment

ROOT = str(Path(ballast.__file__).parents[1])


@pytest.mark.parametrize(
    "name",
    [
        *("BALLAST_API_KEY", "BALLAST_ADMIN_KEY", "BALLAST_ALICE", "HF_TOKEN", "AWS_SESSION_TOKEN"),
        *("HTTPS_PROXY", "OPENAI_API_KEY", "DATABASE_URL", "CUDA_API_KEY", "TORCH_HUB_TOKEN"),
        *("PYTHON_KEYRING_PASSWORD", "OTEL_EXPORTER_OTLP_HEADERS", "LD_secret", "MYSECRET"),
    ],
)
def test_secrets_stay(name: str) -> None:
    assert name not in child_environment(own={name: "x", "PATH": "/bin"})


@pytest.mark.parametrize(
    "name",
    [
        *("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "VIRTUAL_ENV", "XDG_CACHE_HOME", "HF_HOME"),
        *("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "NUMBA_CPU_NAME", "NUMBA_CACHE_DIR"),
        *("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TOKENIZERS_PARALLELISM"),
        *("CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "NCCL_SOCKET_IFNAME", "TRITON_CACHE_DIR"),
        *("BALLAST_CHOICES", "BALLAST_FINDINGS", "BALLAST_LOG_FORMAT", "BALLAST_TEST_SPEED"),
    ],
)
def test_what_libraries_read_goes_on(name: str) -> None:
    assert child_environment(own={name: "x"})[name] == "x"


def test_the_package_is_found() -> None:
    path = child_environment({"OMP_NUM_THREADS": "1"}, own={"PYTHONPATH": "/else"})
    assert path == {"PYTHONPATH": f"{ROOT}{os.pathsep}/else", "OMP_NUM_THREADS": "1"}
    assert child_environment(own={})["PYTHONPATH"] == ROOT
