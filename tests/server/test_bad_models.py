"""Checkpoints that hang, crash or take all memory, in a server: the others are served."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.server.process import server
from tests.server.test_admin import add, ask

OTHER = "wren-mini"
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def changed(file: str, **values: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        known = json.loads((path / file).read_text())
        (path / file).write_text(json.dumps({**known, **values}))

    return change


def brackets(path: Path) -> None:
    (path / "config.json").write_text("[" * 200_000)


def loops(path: Path) -> None:
    (path / "chat_template.jinja").write_text(LOOPS)


BAD: dict[str, tuple[Callable[[Path], None], str]] = {
    "brackets": (brackets, "nested too deeply"),
    "end": (changed("generation_config.json", eos_token_id=[[1]]), "eos_token_id"),
    "layers": (changed("config.json", num_hidden_layers=10**7), "num_hidden_layers"),
}
"""How a checkpoint is made unusable, and what the reason for refusing it names."""


def test_bad_models_are_named_and_the_others_served(fleet_file: Path, tmp_path: Path) -> None:
    """A chat template that never ends costs a model its conversations alone."""
    shutil.copytree(fleet_file.parent, tmp_path, dirs_exist_ok=True)
    text = (tmp_path / "fleet.yaml").read_text().rstrip()
    changes = {name: change for name, (change, _) in BAD.items()}
    for name, change in {**changes, "loops": loops}.items():
        shutil.copytree(tmp_path / OTHER, tmp_path / name)
        change(tmp_path / name)
        text += f"\n  - {{name: {name}, path: {name}}}"
    (tmp_path / "fleet.yaml").write_text(text + "\nserver: {admin_key: sk-admin-of-the-tests}\n")
    with server(tmp_path / "fleet.yaml") as running:
        key = {"authorization": "Bearer sk-admin-of-the-tests"}
        failed = running.http.get("/health", headers=key).json()["failed"]
        assert failed.keys() == BAD.keys()
        for name, (_, reason) in BAD.items():
            assert reason in failed[name]
        assert ask(running, OTHER).status_code == 200
        assert ask(running, "loops").status_code == 200
        body = {"model": "loops", "messages": [{"role": "user", "content": "Hello"}]}
        refused = running.http.post("/v1/chat/completions", json=body)
        assert refused.status_code == 400
        assert "chat template takes more than" in refused.json()["error"]["message"]
        running.until_said("loops answers no conversations")
        for name in ("brackets", "layers"):
            refused = add(running, name="new", path=name)
            assert refused.status_code == 400
            assert BAD[name][1] in refused.json()["error"]["message"]
        assert ask(running, OTHER).status_code == 200
        assert ask(running, "new").status_code == 404
