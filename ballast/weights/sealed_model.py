"""Find a loaded model again by its sealed segments, without its files.

A model is its content, not its path: a worker that takes the place of another, or one more device
that serves the same model, gets the segments that have been served, whatever has become of the
files. What segments do not tell (sizes, layout, how adapters are applied) is in a record beside
them, a `SealedModel`.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass, replace
from pathlib import Path

from ballast import __version__
from ballast.core.settings import ModelSettings
from ballast.weights.host import HostTier, LoraDelta, PackedDelta
from ballast.weights.manifest import Manifest
from ballast.weights.segment import Segment
from ballast.weights.sharding import WHOLE, Shard
from ballast.weights.source_files import identity, listing

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SealedAdapter:
    """An adapter that was loaded with its base."""

    name: str
    fingerprint: str
    deltas: tuple[LoraDelta, ...]
    segment: Segment
    digest: str
    """Of its segment."""
    packed: tuple[PackedDelta, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedModel:
    """All that a model consists of, beside the bytes of its segments."""

    digests: tuple[str, ...]
    """Of all segments, the adapters' last; empty: they cannot be found again (of a shard)."""
    fingerprint: str
    files: str
    """`source_files.identity` when it was loaded."""
    listing: str
    """`source_files.listing` then."""
    tokenizer: str
    """Digest of its tokenizer's files then."""
    manifest: Manifest
    """With an empty `plan`: nothing is read any more."""
    adapters: tuple[SealedAdapter, ...]
    failed: dict[str, str]
    """Adapters that could not be loaded, with the reason."""

    def encode(self) -> bytes:
        import msgspec  # here: where nothing is kept, as on GPUs' images, it need not be there

        return msgspec.msgpack.encode(replace(self, manifest=replace(self.manifest, plan={})))

    @classmethod
    def decode(cls, record: bytes) -> SealedModel:
        import msgspec

        return msgspec.msgpack.decode(record, type=cls)

    def log_changes(self, settings: ModelSettings) -> None:
        """Log it if the model's files are not those that it was loaded from any more."""
        if not Path(settings.path).is_dir():
            text = "%s: its files have gone from %s, or never were here; it serves what was loaded"
            log.error(text, settings.name, settings.path)
        elif identity(settings) != self.files:
            text = (
                "%s: the files at %s have changed since it was loaded; it serves what was loaded. "
                "Remove and add it to serve the new ones"
            )
            log.error(text, settings.name, settings.path)


def brought(settings: ModelSettings, tier: HostTier) -> bool:
    """Whether a whole model is kept on this host, in whatever layout, or has been brought from
    another one, so that its files are not needed."""
    name = settings.name
    return tier.knows(name) or tier.bring(name, kind_of(settings, WHOLE), listing(settings))


def kind_of(settings: ModelSettings, shard: Shard) -> str:
    """Return a hex SHA-256 of what decides, beside its files, how a model is laid out."""
    adapters = [(a.name, str(Path(a.path))) for a in settings.adapters]
    code = (settings.model_impl, settings.linear, shard, __version__)
    dtypes = (settings.dtype, settings.kv_dtype)
    decides = (settings.path, dtypes, settings.max_model_len, adapters, code)
    return hashlib.sha256(repr(decides).encode()).hexdigest()
