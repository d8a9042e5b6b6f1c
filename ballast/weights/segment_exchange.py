"""Define the protocol by which host tiers of one host share segments and models."""

from __future__ import annotations

from typing import Protocol


class SegmentExchange(Protocol):
    """Protocol for sharing segments with other processes of this host.

    Implemented by `ballast.cluster.segment_broker.SegmentClient`.
    """

    def find(self, origin: str) -> tuple[str, int] | None:
        """Find a segment of this origin that another process holds; this process then holds it,
        too.

        Returns its digest and a descriptor that the caller owns, or None.
        """

    def share(self, digest: str, fd: int, origin: str | None) -> int | None:
        """Let other processes map the segment in `fd`, of `origin` if that is known.

        Returns a descriptor, which the caller owns, of an equal segment that another process
        already has, or None.
        """

    def release(self, digest: str) -> None:
        """Report that this process does not hold the segment any more."""

    def map(self, digest: str) -> int | None:
        """Return a descriptor, which the caller owns, of a segment that another process holds or
        has held for a model; None: there is none. This process then holds it, too."""

    def knows_model(self, model: str) -> bool:
        """Return whether a process of this host has loaded a model of this name, of any kind."""

    def bring_model(self, model: str, kind: str, listing: str) -> bool:
        """Have a model of this kind, which is not kept here, sent by another host that keeps it and
        has loaded it from other files than those of `listing`, which are here (empty: there are
        none). Returns whether it is kept here now."""

    def find_model(self, model: str, kind: str) -> int | None:
        """Find the record of a model of this kind that a process of this host has loaded.

        Returns a descriptor that the caller owns, or None. This process then keeps the model, too.
        """

    def keep_model(self, model: str, kind: str, files: str, record: int) -> bool:
        """Keep a model that this process has loaded from `files`, by the record in descriptor
        `record`: other processes find it, also when this one has died.

        Returns False, and keeps nothing, if a process has loaded it from other files.
        """

    def forget_model(self, model: str) -> None:
        """Report that this process does not serve a model any more."""

    @property
    def writable(self) -> bool:
        """`HostTier.writable`, the same for all processes."""
