"""A process that may not open enough files says so, and does not begin."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ballast.core.errors import ConfigError
from ballast.core.settings import DeviceSettings, FleetSettings, ModelSettings
from ballast.server.http.file_limit import LEAST_CONNECTIONS, OTHER_FILES, SPARE, check_files
from tests.server.process import DEADLINE, error_line

BARE = OTHER_FILES + SPARE + LEAST_CONNECTIONS
FEW = 64


def test_too_few_files_are_one_line_and_exit_code_2(fleet_file: Path) -> None:
    ended = subprocess.run(
        (sys.executable, "-m", "ballast", "serve", str(fleet_file), "--port", "0"),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (FEW, FEW)),
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert ended.returncode == 2
    line = error_line(ended.stderr)
    assert f"open files: {FEW}: this fleet needs" in line
    assert "ulimit -Hn" in line


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({"num_hidden_layers": 32}, 32),
        ({"text_config": {"num_hidden_layers": 48}}, 48),
        ({"num_hidden_layers": 10**7}, 1000),
        ({"num_hidden_layers": -3}, 0),
        ({"num_hidden_layers": "x"}, 0),
        ({"text_config": 7}, 0),
        ([], 0),
        (None, 0),
    ],
)
def test_each_layer_needs_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: Any, layers: int
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    fleet = FleetSettings(
        models=(ModelSettings(name="m", path=str(tmp_path)),),
        device=DeviceSettings(budget_bytes=1 << 20),
    )
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    needed = BARE + layers + 4
    monkeypatch.setattr(resource, "getrlimit", lambda _: (needed, needed))
    check_files(fleet)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (needed, needed - 1))
    with pytest.raises(ConfigError, match=f"needs {needed} at least"):
        check_files(fleet)
