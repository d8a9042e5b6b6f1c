"""Choose the environment variables that child processes get.

A server's environment holds API keys, tokens of model hubs and passwords of proxies. Its children
parse untrusted files, so they get what is listed here: what Python, numerical libraries and devices
read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

_NAMES = frozenset({
    "PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TEMP", "TMP",
    "VIRTUAL_ENV", "CONDA_PREFIX", "XDG_CACHE_HOME", "CC", "CXX", "GLIBC_TUNABLES",
    "RUST_BACKTRACE", "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE",
    "TRANSFORMERS_CACHE", "BALLAST_CHOICES", "BALLAST_FINDINGS", "BALLAST_LOG_FORMAT",
})  # fmt: skip
_PREFIXES = (
    "LC_", "PYTHON", "LD_", "MALLOC_", "MIMALLOC_", "COVERAGE_", "OMP_", "GOMP_", "KMP_",
    "MKL_", "OPENBLAS_", "BLIS_", "ONEDNN_", "DNNL_", "ATEN_", "NUMBA_", "RAYON_",
    "TOKENIZERS_", "TORCH_", "TORCHINDUCTOR_", "PYTORCH_", "TRITON_", "TRANSFORMERS_", "CUDA_",
    "CUBLAS_", "CUDNN_", "NVIDIA_", "NCCL_", "GLOO_", "HIP_", "HSA_", "ROCR_", "BALLAST_TEST_",
)  # fmt: skip
_SECRET_WORDS = frozenset({
    "AUTH", "CREDENTIAL", "CREDENTIALS", "KEY", "KEYS", "PASS", "PASSWD", "PASSWORD", "SECRET",
    "SECRETS", "TOKEN",
})  # fmt: skip
"""A variable with one of these words in its name is kept back, whatever its prefix."""


def child_environment(
    more: Mapping[str, str] | None = None, own: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the environment for a child process that runs a module of this package: the listed
    variables of `own` (default: this process's), the package's directory in PYTHONPATH, and
    `more`."""
    own = os.environ if own is None else own
    kept = {name: value for name, value in own.items() if _is_listed(name)}
    root = str(Path(__file__).parents[2])
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, (root, kept.get("PYTHONPATH"))))
    return kept | dict(more or {})


def _is_listed(name: str) -> bool:
    if _SECRET_WORDS.intersection(name.upper().split("_")):
        return False
    return name in _NAMES or name.startswith(_PREFIXES)
