"""Describe the tools whose schema Anthropic's models know, and which the client runs: a shell, a
text editor, a memory. A request names them by type alone; other models need the schema.

`request` turns them into functions by it. The screenshots that `computer` answers with cannot be
read here, and tools that run at Anthropic (`web_search` and others) have nothing that runs them:
these are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TEXT = {"type": "string"}
_LINES = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}
_EDITS = {
    "path": _TEXT,
    "file_text": {**_TEXT, "description": "for create: the whole file"},
    "old_str": {**_TEXT, "description": "for str_replace: a text that the file has once"},
    "new_str": {**_TEXT, "description": "for str_replace: what to put in its place"},
    "insert_line": {"type": "integer", "description": "for insert: the line to insert after"},
    "insert_text": {**_TEXT, "description": "for insert: the text to insert"},
    "view_range": {**_LINES, "description": "for view: first and last line, -1 for the end"},
}
_EDIT_COMMANDS = ("view", "create", "str_replace", "insert")


def _commands(names: tuple[str, ...], fields: Mapping[str, Any], required: str) -> dict[str, Any]:
    command = {"type": "string", "enum": list(names)}
    properties = {"command": command, **fields}
    return {"type": "object", "properties": properties, "required": ["command", required]}


_BASH = {
    "type": "object",
    "properties": {
        "command": {**_TEXT, "description": "the command to run"},
        "restart": {"type": "boolean", "description": "whether to restart the shell instead"},
    },
}
_EDITOR = _commands(_EDIT_COMMANDS, _EDITS, "path")
# Editors before 2025-07 insert `new_str`, and those before 2025-04 can undo an edit.
_FORMER_EDITOR = _commands(
    (*_EDIT_COMMANDS, "undo_edit"), {k: v for k, v in _EDITS.items() if k != "insert_text"}, "path"
)
_MEMORY = {
    "type": "object",
    "properties": {
        "command": {"type": "string", "enum": [*_EDIT_COMMANDS, "delete", "rename"]},
        **_EDITS,
        "old_path": {**_TEXT, "description": "for rename"},
        "new_path": {**_TEXT, "description": "for rename"},
    },
    "required": ["command"],
}
_SCHEMAS = (
    ("bash_", "Run a command in a shell that stays open.", _BASH),
    ("text_editor_202507", "View and edit text files.", _EDITOR),
    ("text_editor_", "View and edit text files.", _FORMER_EDITOR),
    ("memory_", "Read and write files that are kept between conversations.", _MEMORY),
)
"""Descriptions and schemas by the beginning of the type, which a date follows."""


def known_function(tool: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return a tool of the Messages API with the schema of its input; None where it has none: it
    cannot be called by any model but Anthropic's."""
    kind = tool.get("type")
    if kind in (None, "custom") or isinstance(tool.get("input_schema"), Mapping):
        return tool
    for beginning, description, schema in _SCHEMAS:
        if isinstance(kind, str) and kind.startswith(beginning):
            return {"description": description, **tool, "input_schema": schema}
    return None
