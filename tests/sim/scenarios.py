"""Random scenarios: fleets under memory pressure, and what clients, operators and peers do to them.

A scenario is plain data, so that a failing one can be pasted into a test as it is printed. One
generator makes them, from whatever answers its `Choices`: hypothesis, which shrinks what it chose,
or a seed, which gives the same scenario for ever.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from hypothesis import strategies as st

from ballast.core.cost import activation_bytes
from ballast.core.model import AdapterSpec, ModelSpec, weight_pages
from ballast.core.request import Submission
from ballast.core.settings import DeviceSettings, Slo
from ballast.core.units import KiB, ceil_div
from ballast.policy.presets import ORDERS

T = TypeVar("T")


class Choices(Protocol):
    """What a generator leaves open."""

    def integer(self, least: int, most: int) -> int:
        """One of `least` to `most`; the least is the simplest."""

    def pick(self, of: Sequence[T]) -> T:
        """One of them; the first is the simplest."""

    def many(self, make: Callable[[Choices], T], least: int, most: int) -> list[T]:
        """`least` to `most` of what `make` makes."""


@dataclass(frozen=True, slots=True)
class Seeded:
    """Implements `Choices`: the same for the same seed."""

    random: random.Random

    def integer(self, least: int, most: int) -> int:
        return self.random.randint(least, most)

    def pick(self, of: Sequence[T]) -> T:
        return self.random.choice(of)

    def many(self, make: Callable[[Choices], T], least: int, most: int) -> list[T]:
        return [make(self) for _ in range(self.random.randint(least, most))]


@dataclass(frozen=True, slots=True)
class Drawn:
    """Implements `Choices` by hypothesis."""

    draw: st.DrawFn

    def integer(self, least: int, most: int) -> int:
        return self.draw(st.integers(least, most))

    def pick(self, of: Sequence[T]) -> T:
        return self.draw(st.sampled_from(of))

    def many(self, make: Callable[[Choices], T], least: int, most: int) -> list[T]:
        one = st.composite(lambda draw: make(Drawn(draw)))()
        return self.draw(st.lists(one, min_size=least, max_size=most))


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model of a scenario; what is not said is as in every other."""

    layers: int = 2
    weight_pages: int = 4
    """Of each segment: its embeddings, its layers, its head."""
    kv_heads: int = 1
    block_tokens: int = 16
    common: bool = False
    """Its embeddings and first layer are those of every other such model of the same sizes."""
    pinned: bool = False
    ttl: float | None = None
    adapter: bool = False
    share: float = 1.0
    ttft: float = 1.0
    max_running: int = 8
    queue_seconds: float | None = None

    def spec(self, name: str, page_bytes: int) -> ModelSpec:
        n_bytes = self.weight_pages * page_bytes
        sizes = (n_bytes,) * (self.layers + 2)
        digests = tuple(f"{name}-{i}" for i in range(len(sizes)))
        if self.common:
            digests = (f"{n_bytes}-first", f"{n_bytes}-second", *digests[2:])
        tuned = AdapterSpec(name=f"{name}-tuned", fingerprint="tuned", rank=2)
        return ModelSpec(
            name=name,
            n_layers=self.layers,
            n_heads=4,
            kv_heads=self.kv_heads,
            head_dim=32,
            hidden=64,
            intermediate=64,
            vocab=256,
            dtype="float32",
            max_model_len=1024,
            block_tokens=self.block_tokens,
            segment_bytes=sizes,
            segment_digests=digests,
            fingerprint=name,
            slo=Slo(ttft=self.ttft, tpot=0.1),
            share=self.share,
            max_running=self.max_running,
            queue_seconds=self.queue_seconds,
            pinned=self.pinned,
            ttl=self.ttl,
            adapters=(tuned,) if self.adapter else (),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """`n` requests, one after the other; ids count up from `r0` over the whole scenario."""

    after: float
    """Seconds since the act before it; of every act."""
    model: int
    """Index, modulo the number of models; of every act that names one."""
    prompt: int
    output: int
    n: int = 1
    gap: float = 0.0
    """Seconds from one of them to the next."""
    priority: int = 0
    stem: int = 0
    """Tokens at the beginning that all prompts have in common."""
    tuned: bool = False
    """Of the model's adapter, if it has one."""
    device: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdraw:
    """A client goes away."""

    after: float
    request: int
    """Index of a request that was asked before, modulo their number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """A client does not read for so many `seconds`."""

    after: float
    request: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What an operator orders: `activate`, `evict`, `change`, `leave` or `join` a model, `lend` or
    `recall` pages, `part` the devices for a second."""

    after: float
    what: str
    model: int = 0
    amount: int = 0
    """Pages; of a change its share, and whether the model is pinned then (odd)."""
    device: int = 0


Act = Ask | Withdraw | Rest | Order


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A device, or two that may lend to each other, and what happens."""

    preset: str
    options: tuple[tuple[str, float], ...] = ()
    lanes: int = 1
    leaps: bool = True
    page_kib: int = 16
    link: float = 1e8
    models: tuple[Model, ...]
    joining: tuple[Model, ...] = ()
    """Models that orders add one by one."""
    more_weights: int = 0
    """Percent of the weights that may be beside the least without which nothing is served."""
    kv_pages: int = 40
    """Pages that weights and activations leave."""
    peer: int = 0
    """Pages that a second device has beyond the first; 0: there is none."""
    acts: tuple[Act, ...]

    @property
    def specs(self) -> list[ModelSpec]:
        return [m.spec(f"m{i}", self.page_kib * KiB) for i, m in enumerate(self.models)]

    @property
    def joiners(self) -> list[ModelSpec]:
        n = len(self.models)
        return [m.spec(f"m{n + i}", self.page_kib * KiB) for i, m in enumerate(self.joining)]

    @property
    def settings(self) -> DeviceSettings:
        """Of the first device."""
        page = self.page_kib * KiB
        specs = self.specs
        job = max(activation_bytes(s, 32, 8) for s in (*specs, *self.joiners))
        arena = ceil_div(self.lanes * job, page) + 1
        pinned = [s for s in specs if s.pinned]
        least = max(weight_pages({s.name: s for s in (*pinned, m)}.values(), page) for m in specs)
        whole = weight_pages(specs, page)
        weights = least + (whole - least) * self.more_weights // 100
        return DeviceSettings(
            budget_bytes=(arena + weights + self.kv_pages) * page,
            page_bytes=page,
            step_tokens=32,
            step_logits=8,
            lanes=self.lanes,
            threads=self.lanes,
        )


def prompt(k: int, length: int, stem: int) -> tuple[int, ...]:
    """Of the request number `k`: its first `stem` tokens are those of all others."""
    common = random.Random(0).choices(range(256), k=min(stem, length))
    return (*common, *random.Random(k + 1).choices(range(256), k=length - len(common)))


def submission(ask: Ask, model: str, k: int, at: float) -> Submission:
    """The request number `k`."""
    return Submission(
        id=f"r{k}",
        model=model,
        prompt=prompt(k, ask.prompt, ask.stem),
        max_tokens=ask.output,
        arrival=at,
        priority=ask.priority,
        ignore_eos=True,
    )


TURNS = (("temporal", 1.0), ("quantum", 0.1))
OPTIONS: dict[str, tuple[tuple[tuple[str, float], ...], ...]] = {
    "static": ((),),
    "muxserve": ((), (("adapt", 0.1),)),
    "swap": ((), (("quantum", 0.05),)),
    "lru": ((), (("parallel", 1.0), ("quantum", 0.05)), (("quantum", 0.05),)),
    "balloon": ((), (("patience", 0.0),), (("patience", 5.0),)),
    "recompute": (
        (),
        (("pooled", 0.0),),
        TURNS,
        (*TURNS, ("preemptive", 1.0)),
        (*TURNS, ("preemptive", 1.0), ("pooled", 0.0)),
    ),
    "mirage": (
        (),
        (("cap", 0.0),),
        (("cap", 0.0), ("pooled", 0.0)),
        (*TURNS, ("cap", 0.0)),
        (*TURNS, ("preemptive", 1.0), ("cooldown", 0.2)),
    ),
    "kvswap": (
        (),
        (("cap", 0.0),),
        (("cap", 0.0), ("pooled", 0.0)),
        (*TURNS, ("cap", 0.0)),
        (*TURNS, ("preemptive", 1.0)),
    ),
}
"""By preset."""
PLACES = ("static", "recompute", "superinfer", "mirage", "kvswap", "muxserve")
"""Presets under which models keep their places."""


ANY_ORDER = ("", *(f"+{name}" for name in ORDERS))
FIRST_ORDERS = ("", "+round-robin", "+deadline")
"""Those that seeds were chosen with: of stories, and of defects that are put back."""


def scenario(
    c: Choices, presets: Sequence[str] = tuple(OPTIONS), orders: Sequence[str] = ANY_ORDER
) -> Scenario:
    """Any that the machinery allows, under one of `presets` and of `orders`."""
    memory = c.pick(presets)
    order = c.pick(orders)
    models = c.many(_model, 2, 5)
    common = c.pick((False, False, True))
    models = [
        replace(models[0], common=common),
        *(_alike(m, models[0], common) for m in models[1:]),
    ]
    if memory not in PLACES and sum(m.pinned for m in models) > 2:
        models = [replace(m, pinned=False) for m in models]
    lanes = c.pick((1, 1, 2, 3, 4))
    peer = c.pick((0, 0, 0, 60))
    acts = _siege(c) if c.pick((False, True)) else []
    acts += c.many(lambda c: _act(c, bool(peer)), 1, 10)
    return Scenario(
        preset=memory + order,
        options=c.pick(OPTIONS[memory]),
        lanes=lanes,
        leaps=c.pick((True, False)) and not peer,
        page_kib=c.pick((16, 64)),
        link=c.pick((1e8, 1e7, 1e9)),
        models=tuple(models),
        joining=tuple(c.many(_model, 0, 1)),
        more_weights=c.pick((0, 30, 100)) if memory not in PLACES else c.pick((100, 60)),
        kv_pages=c.pick((20, 40, 80, 160)),
        peer=peer,
        acts=tuple(acts),
    )


def stream(c: Choices) -> Scenario:
    """A long prompt waits under a preset that undoes nobody for it, and small requests for other
    models come for as long as that takes."""
    memory = c.pick(("recompute", "mirage"))
    return Scenario(
        preset=memory,
        options=() if memory == "recompute" else (("portion", 0.0),),
        lanes=c.pick((1, 2)),
        models=(
            Model(),
            Model(ttft=c.pick((1.0, 0.05)), kv_heads=2),
            Model(kv_heads=c.pick((1, 2))),
        ),
        more_weights=100,
        kv_pages=c.pick((20, 30, 40)),
        acts=(
            Ask(
                after=0.0,
                model=0,
                prompt=100,
                output=c.pick((100, 300)),
                n=c.integer(1, 3),
                gap=0.05,
            ),
            Ask(after=0.3, model=1, prompt=290, output=4),
            *(
                Ask(
                    after=0.05,
                    model=model,
                    prompt=c.pick((30, 60)),
                    output=c.pick((10, 60)),
                    n=8,
                    gap=0.1,
                )
                for model in (2, 0)
            ),
        ),
    )


def _model(c: Choices) -> Model:
    return Model(
        layers=c.pick((2, 3, 6)),
        weight_pages=c.integer(1, 6),
        kv_heads=c.pick((1, 2, 4)),
        block_tokens=c.pick((16, 4)),
        pinned=c.pick((False, False, False, True)),
        ttl=c.pick((None, None, None, 0.3)),
        adapter=c.pick((False, False, True)),
        share=c.pick((1.0, 3.0)),
        ttft=c.pick((1.0, 0.05, 10.0)),
        max_running=c.pick((8, 2)),
        queue_seconds=c.pick((None, None, None, 2.0)),
    )


def _alike(m: Model, first: Model, common: bool) -> Model:
    """Such that it can have segments in common with the first."""
    if not common:
        return m
    return replace(m, common=True, layers=first.layers, weight_pages=first.weight_pages)


def _siege(c: Choices) -> list[Act]:
    """Long answers of some models; then a long prompt for another, which finds no room; then many
    small requests, which would."""
    long = c.many(lambda c: _ask(c, (300, 100), (400, 160), c.integer(1, 2)), 1, 3)
    lacking = _ask(c, (300,), (4, 40), 1)
    small = _ask(c, (20,), (40, 4), c.integer(2, 8))
    return [*long, replace(lacking, priority=c.pick((5, 0))), small]


def _ask(c: Choices, prompts: Sequence[int], outputs: Sequence[int], n: int) -> Ask:
    return Ask(
        after=c.pick((0.05, 0.3)),
        model=c.integer(0, 4),
        prompt=c.pick(prompts) - c.integer(0, 19),
        output=c.pick(outputs),
        n=n,
        gap=c.pick((0.02, 0.2)),
    )


def _act(c: Choices, peers: bool) -> Act:
    after = c.integer(0, 60) * c.pick((0.0, 0.005, 0.02))
    kind = c.pick(("ask", "ask", "ask", "ask", "burst", "burst", "withdraw", "rest", "order"))
    if kind == "withdraw":
        return Withdraw(after=after, request=c.integer(0, 40))
    if kind == "rest":
        return Rest(after=after, request=c.integer(0, 40), seconds=c.pick((0.05, 0.5)))
    if kind == "order":
        kinds = ("evict", "activate", "change", "leave", "join")
        kinds += ("lend", "lend", "lend", "recall", "part") if peers else ()
        return Order(
            after=after,
            what=c.pick(kinds),
            model=c.integer(0, 4),
            amount=c.integer(1, 30),
            device=c.pick((0, 1)) if peers else 0,
        )
    return Ask(
        after=after,
        model=c.integer(0, 4),
        prompt=c.pick((20, 100, 300)) - c.integer(0, 19),
        output=c.pick((4, 40, 160)) - c.integer(0, 3),
        n=1 if kind == "ask" else c.integer(2, 8),
        gap=0.0 if kind == "ask" else c.pick((0.0, 0.02, 0.2)),
        priority=c.pick((0, 0, 0, 5, -1)),
        stem=c.pick((0, 64, 200)),
        tuned=c.pick((False, False, True)),
        device=c.pick((0, 0, 1)) if peers else 0,
    )
