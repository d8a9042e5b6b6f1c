"""Number the requests of a story and digest their blocks, in place of ids and tokens.

Used by `core.story` where a sink receives all that a replay needs.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Sequence

from ballast.core.chains import Chain, digest
from ballast.core.entries import StoryEntry
from ballast.core.event import CancelledOutput, FailedOutput, FinishedOutput, Output, TokenOutput
from ballast.core.model import ModelSpec
from ballast.core.request import Request, Submission

_End = FinishedOutput | FailedOutput | CancelledOutput


class StoryRequests:
    """Open requests of one device with their numbers and, with a prefix cache, digest chains."""

    def __init__(self, key: bytes) -> None:
        """`key`: of the digests that replace tokens."""
        self._key = key
        self.caches_prefixes = False
        """Whether the device has a prefix cache."""
        self.open: dict[str, tuple[int, Chain | None]] = {}
        """By id: number and digest chain; None where prefixes are not cached."""
        self._arrivals = 0
        self._named: dict[str, tuple[str, int]] = {}
        """For each model and adapter by name: its fingerprint, and the tokens in a block."""

    def add_model(self, spec: ModelSpec) -> None:
        """Add a model that joins the device, with its adapters."""
        for served in spec.served:
            self._named[served.name] = served.fingerprint, spec.block_tokens

    def add_arrival(self, entry: StoryEntry, s: Submission) -> None:
        """Open a request, and add all fields of its submission that affect the engine to its
        entry."""
        chain = self.number(entry, s)
        if s.id in self.open:
            entry["open_already"] = True
            entry.pop("blocks", None)
        else:
            self.open[s.id] = entry["n"], chain
        entry["arrival"] = s.arrival
        for name in ("open_ended", "priority", "prompt_logprobs", "embed"):
            value = getattr(s, name)
            if value or (value is not None and name == "prompt_logprobs"):
                entry[name] = value
        if s.sampling.grammar:
            entry["grammar"] = True
        if s.resumed is not None:
            entry["resumed"] = len(s.resumed)
            if s.age:
                entry["age"] = s.age
            if s.first_token_age is not None:
                entry["first_token_age"] = s.first_token_age

    def number(self, entry: StoryEntry, s: Submission) -> Chain | None:
        """Number a sequence and add its block digests to the entry; return its digest chain, None
        if prefixes are not cached."""
        entry["n"] = self._arrivals
        self._arrivals += 1
        if s.salt:
            entry["salt"] = digest(self._key, s.salt.encode()).hex()
        if s.tenant:
            entry["tenant"] = digest(self._key, s.tenant.encode()).hex()
        if not self.caches_prefixes or s.model not in self._named:
            return None
        fingerprint, size = self._named[s.model]
        chain = Chain(self._key, f"{fingerprint}:{s.salt}", size)
        full = chain.push(s.prompt) + chain.push(s.resumed or ())
        if full:
            entry["blocks"] = b64encode(full).decode()
        return chain

    def filled_by(self, outputs: Iterable[Output]) -> dict[str, str]:
        """Return digests of the blocks that output tokens have filled, by number of request."""
        filled = {}
        for output in outputs:
            if type(output) is TokenOutput:
                number, chain = self.open[output.request_id]
                if chain is not None and (full := chain.add(output.token)):
                    filled[str(number)] = b64encode(full).decode()
        return filled

    def filled_in(self, moved: Iterable[Request]) -> dict[str, str]:
        """Return digests of the blocks that requests have filled without outputs, by number."""
        filled = {}
        for r in moved:
            number, chain = self.open[r.id]
            if chain is not None and (full := chain.push(r.tokens[chain.tokens :])):
                filled[str(number)] = b64encode(full).decode()
        return filled

    def end(self, outputs: Sequence[Output], refused: bool = False) -> list[StoryEntry]:
        """Close the requests that outputs end; return an entry for each. `refused`: its id was in
        use by an open request, which stays open."""
        return [
            self._end(output, refused)
            for output in outputs
            if type(output) is not TokenOutput and isinstance(output, _End)
        ]

    def _end(self, output: _End, refused: bool) -> StoryEntry:
        entry: StoryEntry = {"request": output.request_id}
        if not refused:
            entry["n"] = self.open.pop(output.request_id)[0]
        if isinstance(output, FinishedOutput):
            entry |= {
                "finished": output.reason,
                "output_tokens": output.output_tokens,
                "cached_tokens": output.cached_tokens,
                "preemptions": output.preemptions,
            }
        else:
            # Not its reason, which may speak of tokens.
            entry["failed"] = output.code if isinstance(output, FailedOutput) else "cancelled"
        return entry
