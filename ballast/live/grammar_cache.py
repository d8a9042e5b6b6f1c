"""Track the grammars that open requests need: queued, compiled or cached, within memory bounds.

The bookkeeping of `ballast.live.grammar_compiler`: compiles nothing and starts no thread.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field

from ballast.core.errors import BrokenPromise
from ballast.core.fairqueue import FairQueue
from ballast.core.units import MiB
from ballast.models.grammar import CompiledGrammar, Grammars, estimated_bytes

MOST_WAITING_EACH, MOST_WAITING = 64, 512
"""Most grammars that wait to be compiled, for one API key and in all; more are refused."""
MOST_BYTES_EACH, MOST_BYTES = 128 * MiB, 256 * MiB
"""Most bytes of compiled grammars: needed by open requests of one API key, and in all. A grammar
beyond that waits until others are no longer needed."""
LEAST_CHARGE = 2 * MiB
"""Least bytes charged for a grammar, however short: its lexer grows with the outputs."""


@dataclass(slots=True, eq=False)
class CachedGrammar:
    """A grammar, for one tokenizer."""

    key: tuple[str, str]
    """(`GrammarTokenizer.key`, the grammar's text)."""
    tenant: str
    """API key (tenant) of the first request that needed it."""
    users: dict[str, Grammars] = field(default_factory=dict)
    """Makers of matchers of the open requests that need it, by request id."""
    waits: bool = True
    """Whether it is queued for compilation."""
    known: bool = True
    """Whether later requests may share it."""
    compiled: CompiledGrammar | None = None

    @property
    def text(self) -> str:
        return self.key[1]

    @property
    def charge(self) -> int:
        """Bytes charged, from before compilation until it is neither known nor needed."""
        return max(LEAST_CHARGE, estimated_bytes(self.text))


class GrammarCache:
    """Grammars, each kept once for all requests that need it. For one thread at a time.

    Grammars that no request needs stay cached while there is room, the most recently used first.
    """

    def __init__(self) -> None:
        self._queue: FairQueue[CachedGrammar] = FairQueue(MOST_WAITING_EACH, MOST_WAITING)
        self._known: OrderedDict[tuple[str, str], CachedGrammar] = OrderedDict()
        """Least recently used first."""
        self._of: dict[str, CachedGrammar] = {}
        """Grammar of each open request, by request id."""
        self._charged = 0
        """Bytes charged in all."""
        self._charged_to: Counter[str] = Counter()
        """Bytes charged, by tenant, for grammars that open requests need."""

    @property
    def estimated_bytes(self) -> int:
        """Estimated memory of all compiled grammars, in bytes."""
        return sum(estimated_bytes(e.text) for e in self._known.values() if not e.waits)

    def need(
        self, request_id: str, text: str, tenant: str, grammars: Grammars
    ) -> CachedGrammar | str:
        """Note that a request needs a grammar. Returns why it is refused where too many wait."""
        key = grammars.tokenizer.key, text
        entry = self._known.get(key)
        if entry is not None and entry.compiled is not None and entry.compiled.broken:
            self._forget(entry)
            entry = None
        if entry is None:
            entry = CachedGrammar(key, tenant)
            refusal = self._queue.put(tenant, entry)
            if refusal is not None:
                return f"grammars to be compiled: {refusal}"
            self._known[key] = entry
        self._known.move_to_end(key)
        if not entry.users and not entry.waits:
            self._charged_to[entry.tenant] += entry.charge
        entry.users[request_id] = grammars
        self._of[request_id] = entry
        return entry

    def ended(self, request_id: str) -> None:
        """Note that a request has ended; one that was refused has nothing here."""
        entry = self._of.pop(request_id, None)
        if entry is None:
            return
        entry.users.pop(request_id).release(request_id)
        if entry.users:
            return
        if entry.waits:
            self._queue.remove(entry.tenant, entry)
            self._forget(entry)
            return
        self._charged_to[entry.tenant] -= entry.charge
        if not entry.known:
            self._charged -= entry.charge

    def next(self) -> CachedGrammar | None:
        """Take the grammar to be compiled next out of the queue; None: none can be, now."""
        entry = self._queue.take(self._fits)
        if entry is not None:
            entry.waits = False
            self._make_room(entry.charge)
            self._charged += entry.charge
            self._charged_to[entry.tenant] += entry.charge
        return entry

    def compiled(self, entry: CachedGrammar, compiled: CompiledGrammar | None) -> None:
        """Record the result for the grammar that `next` returned; None: it cannot be compiled."""
        entry.compiled = compiled
        if compiled is None:
            self._forget(entry)

    def validate(self) -> None:
        """Raises BrokenPromise unless entries, requests and charges agree, within bounds."""
        entries = {id(e): e for e in (*self._known.values(), *self._of.values())}.values()
        made = [e for e in entries if not e.waits]
        needed = Counter[str]()
        for e in made:
            needed[e.tenant] += e.charge if e.users else 0
        if self._charged != sum(e.charge for e in made) or +self._charged_to != +needed:
            raise BrokenPromise("grammars: what is charged is a miscount")
        if any(not e.users for e in entries if e.waits or not e.known):
            raise BrokenPromise("grammars: one is kept that nobody can use")
        if len(self._queue) != sum(e.waits for e in entries):
            raise BrokenPromise("grammars: the queue is not of those that wait")
        if {(r, id(e)) for e in entries for r in e.users} != {
            (r, id(e)) for r, e in self._of.items()
        }:
            raise BrokenPromise("grammars: requests and what they need do not agree")
        if self._charged > MOST_BYTES and len(made) > 1:
            raise BrokenPromise("grammars: more memory is charged than may be")

    def _fits(self, entry: CachedGrammar) -> bool:
        """Return whether there is, or can be made, room for it; a single grammar always fits."""
        own, needed = self._charged_to[entry.tenant], self._charged_to.total()
        return (not own or own + entry.charge <= MOST_BYTES_EACH) and (
            not needed or needed + entry.charge <= MOST_BYTES
        )

    def _make_room(self, n_bytes: int) -> None:
        """Drop grammars that no request needs, least recently used first."""
        for entry in [e for e in self._known.values() if not e.users and not e.waits]:
            if self._charged + n_bytes <= MOST_BYTES:
                return
            self._forget(entry)

    def _forget(self, entry: CachedGrammar) -> None:
        """Stop sharing a grammar with later requests; present ones keep it until they end."""
        entry.known = False
        del self._known[entry.key]
        if not entry.users and not entry.waits:
            self._charged -= entry.charge
