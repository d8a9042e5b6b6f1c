"""Generate token ids for the block digests of a story, which contains no tokens.

Prompts that shared a prefix in the recorded run share one here, so the prefix cache behaves the
same. Used by `sim.story_events`.
"""

from __future__ import annotations

from base64 import b64decode
from collections import defaultdict
from collections.abc import Iterable

from ballast.core.chains import DIGEST_BYTES
from ballast.core.entries import StoryEntry
from ballast.core.model import ModelSpec


class StandInTokens:
    """Token ids for all requests of a recorded device, by request number.

    Blocks that follow the same block are numbered in the order in which they are met, and the
    tokens of a block encode its number: blocks are equal if and only if their digests are. There
    are always enough numbers, because the recorded blocks had as many tokens of the same
    vocabulary.
    """

    def __init__(self, entries: Iterable[StoryEntry]) -> None:
        self._digests: dict[int, list[bytes]] = defaultdict(list)
        self._roots: dict[int, tuple[str, str]] = {}
        """By request, the fields that separate prefix caches: its model or adapter, and its
        salt."""
        self._prints: dict[str, str] = {}
        """Fingerprints of models and adapters, by name."""
        self._numbers: defaultdict[object, dict[bytes, int]] = defaultdict(dict)
        """Numbers of the blocks that follow a block, by its digest; of first blocks, by root."""
        for entry in entries:
            blocks = entry.get("blocks")
            if entry.get("event") in ("Arrival", "ImportKv"):
                self._roots[entry["n"]] = entry["model"], entry.get("salt", "")
                if blocks:
                    self._digests[entry["n"]] += _cut(blocks)
            elif blocks:
                for n, more in blocks.items():
                    self._digests[int(n)] += _cut(more)

    def tokens(self, spec: ModelSpec, n: int, start: int, end: int) -> tuple[int, ...]:
        """Return the tokens of request `n` at positions `start .. end`, `end` excluded."""
        size = spec.block_tokens
        return tuple(
            self._block(spec, n, at // size) // spec.vocab ** (at % size) % spec.vocab
            for at in range(start, end)
        )

    def _block(self, spec: ModelSpec, n: int, i: int) -> int:
        """Return the number of a request's block; 0 for one that never filled and is never looked
        up."""
        digests = self._digests[n]
        if i >= len(digests):
            return 0
        following = self._numbers[digests[i - 1] if i else self._root(spec, n)]
        return following.setdefault(digests[i], len(following))

    def _root(self, spec: ModelSpec, n: int) -> tuple[str, str]:
        name, salt = self._roots[n]
        if name not in self._prints:
            self._prints |= {served.name: served.fingerprint for served in spec.served}
        return self._prints[name], salt


def _cut(blocks: str) -> list[bytes]:
    raw = b64decode(blocks)
    return [raw[at : at + DIGEST_BYTES] for at in range(0, len(raw), DIGEST_BYTES)]
