"""The files of a checkpoint that make up its tokenizer, and a digest of them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

FILES = (
    "added_tokens.json",
    "config.json",  # names the tokenizer's class if no other file does
    "merges.txt",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)


def digest_of(directory: Path) -> str:
    """Return a hex SHA-256 over the names and bytes of those that are there."""
    found = hashlib.sha256()
    for name in FILES:
        path = directory / name
        if path.is_file():
            found.update(json.dumps([name, path.stat().st_size]).encode())
            with path.open("rb") as file:
                while part := file.read(1 << 20):
                    found.update(part)
    return found.hexdigest()
