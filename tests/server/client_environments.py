"""Environments of their own for clients whose requirements are not ours."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def python_with(requirement: str, factory: pytest.TempPathFactory) -> str:
    """Return the interpreter of a new environment with `requirement`, and what it needs, alone.

    Skips the test if no package index can be reached.
    """
    venv = factory.mktemp("client")
    subprocess.run((sys.executable, "-m", "venv", venv), check=True)
    python = str(venv / "bin" / "python")
    installing = subprocess.run(
        (python, "-m", "pip", "install", "--quiet", requirement),
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
    )
    if "No matching distribution" in installing.stderr:
        pytest.skip("no package index can be reached")
    assert installing.returncode == 0, installing.stderr
    return python
