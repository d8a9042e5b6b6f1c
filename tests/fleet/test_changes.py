"""Operators' changes: what they and the fleet file make together, whoever spoke last."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballast.core.actions import Change
from ballast.core.settings import AdapterSettings, ModelSettings
from ballast.fleet.changes import Changes, changed, merged, rehomed
from ballast.fleet.levels import Levels, foreign, keys_of, levels_of, said, with_levels
from ballast.fleet.schema import LiveKeys, NamedModelKeys


def entry(name: str, path: str | None = "p", **more: object) -> NamedModelKeys:
    return NamedModelKeys.model_validate({"name": name, **({"path": path} if path else {}), **more})


def lora(name: str, base: str) -> NamedModelKeys:
    return entry(name, None, adapter="l", base=base)


def settings(name: str, **more: object) -> ModelSettings:
    return ModelSettings(name=name, path="p", **more)  # type: ignore[arg-type]


FILE = (entry("a"), lora("a-lora", "a"), entry("b"))
NAMES = {e.name for e in FILE}


def served(changes: Changes, file: tuple[NamedModelKeys, ...] = FILE) -> list[str]:
    return [e.name for _, e in merged(file, changes).entries]


def test_no_changes_leave_the_file() -> None:
    result = merged(FILE, Changes())
    assert [e for _, e in result.entries] == list(FILE)
    assert (result.changes, result.notes) == (Changes(), ())


def test_what_was_added_and_removed() -> None:
    changes = Changes().adding(entry("c"), ()).removing({"b"}, NAMES)
    assert served(changes) == ["a", "a-lora", "c"]
    assert served(changes.removing({"c"}, NAMES)) == ["a", "a-lora"]
    assert changes.removing({"c"}, NAMES).added == ()
    assert merged(FILE, changes).notes == ()


def test_a_model_goes_with_its_adapters_also_those_that_the_file_gets_later() -> None:
    changes = Changes().removing({"a", "a-lora"}, NAMES)
    assert served(changes) == ["b"]
    again = changes.adding(entry("a", "other"), ())
    assert served(again) == ["b", "a"]
    more = merged((*FILE, lora("late", "a")), changes)
    assert [e.name for _, e in more.entries] == ["b"]
    assert more.notes == ("late is not served: its base, a, was removed",)


def test_a_model_can_stand_in_for_one_of_the_file() -> None:
    changes = Changes().adding(entry("a", "other"), ("a", "a-lora"))
    assert [(e.name, e.path) for _, e in merged(FILE, changes).entries] == [
        ("b", "p"),
        ("a", "other"),
    ]


def test_the_file_counts_where_it_was_edited_since() -> None:
    changes = Changes().adding(entry("c", "mine"), ()).removing({"b"}, NAMES)
    result = merged((entry("a"), entry("c", "theirs")), changes)
    assert [(e.name, e.path) for _, e in result.entries] == [("a", "p"), ("c", "theirs")]
    assert result.changes == Changes(version=1)
    assert [note.split(" was ")[0] for note in result.notes] == ["b", "c"]


def test_levels_stand_until_the_file_says_otherwise() -> None:
    model = settings("a")
    changes = Changes().changing(model, {"slo.ttft": 1.0, "priority": 5})
    (now,), kept, notes = changed([model], changes)
    assert (now.slo.ttft, now.slo.tpot, now.priority) == (1.0, 0.2, 5)
    assert (kept, notes) == (changes, ())
    (now,), kept, notes = changed([settings("a", priority=2)], changes)
    assert (now.slo.ttft, now.priority) == (1.0, 2)
    assert kept == Changes().changing(model, {"slo.ttft": 1.0})
    assert notes == ("a: priority was changed; the fleet file's value counts",)
    (now,), kept, notes = changed([settings("a", priority=5)], changes)
    assert (now.priority, notes) == (5, ())
    assert kept == Changes().changing(model, {"slo.ttft": 1.0})
    _, kept, notes = changed([settings("b")], changes)
    assert kept == Changes(version=1)
    assert notes == ("a was changed; there is no such model any more",)


def test_levels_of_adapters() -> None:
    model = settings("a", adapters=(AdapterSettings(name="a-lora", path="l"),))
    changes = Changes().changing(model.adapters[0], {"limits.queue_seconds": 3.0})
    (now,), kept, _ = changed([model], changes)
    assert now.adapters[0].queue_seconds == 3.0
    assert kept == changes
    assert foreign({"pinned": True, "slo.ttft": 1.0, "limits.running": 3}) == [
        "pinned",
        "limits.running",
    ]
    assert foreign({"priority": 1, "limits.waiting": 3, "limits.queue_seconds": None}) == []
    assert Change.to(now.adapters[0]).queue_seconds == 3.0


def test_a_second_change_remembers_what_was_before_the_first() -> None:
    model = settings("a")
    once = Changes().changing(model, {"priority": 1})
    twice = once.changing(with_levels(model, {"priority": 1}), {"priority": 2, "pinned": True})
    assert said(twice.changed["a"].was) == {"priority": 0, "pinned": False}
    assert said(twice.changed["a"].now) == {"priority": 2, "pinned": True}
    latest = with_levels(model, {"priority": 2, "pinned": True})
    assert twice.changing(latest, {"priority": 0, "pinned": False}) == Changes(version=1)


def test_devices_stand_until_the_file_says_otherwise() -> None:
    model, other = settings("a"), settings("b", devices=("x",))
    once = Changes().homing(model, ("x", "y")).homing(other, ("y",))
    found, kept, notes = rehomed([model, other], once, ("x", "y"))
    assert [m.devices for m in found] == [("x", "y"), ("y",)]
    assert (kept, notes) == (once, ())
    reread = Changes.model_validate_json(once.model_dump_json(exclude_unset=True))
    assert reread.homes == once.homes
    twice = once.homing(found[0], ("y",))
    assert (twice.homes["a"].was, twice.homes["a"].now) == ((), ("y",))
    assert twice.homing(found[1], ("x",)).homes.keys() == {"a"}
    both = Changes().homing(settings("a", devices=("x", "y")), ("y",))
    assert both.homing(settings("a", devices=("y",)), ("y", "x")).homes == {}

    for file, devices, why in (
        ([settings("a", devices=("y",)), other], ("x", "y"), "the fleet file's count"),
        ([other], ("x", "y"), "there is no such model any more"),
        ([model, other], ("x", "z"), "there is no y any more"),
    ):
        found, kept, notes = rehomed(file, twice, devices)
        assert f"the devices of a were changed; {why}" in notes
        assert "a" not in kept.homes
        assert [m.devices for m in found if m.name == "a"] == [
            m.devices for m in file if m.name == "a"
        ]


def test_devices_go_with_their_model_and_come_back_with_what_was_not_done() -> None:
    before = Changes().homing(settings("a"), ("x",)).homing(settings("b"), ("x",))
    gone = before.removing({"b", "c"}, NAMES)
    assert gone.homes.keys() == {"a"}
    assert gone.restoring({"b"}, before) == before
    moved = before.homing(settings("a"), ("y",)).homing(settings("c"), ("y",))
    assert moved.homed_as("a", before).homed_as("c", before) == before
    assert moved.changing(settings("a"), {"priority": 1}).homes == moved.homes
    assert moved.adding(entry("d"), ()).homes == moved.homes


def test_what_was_not_done_is_taken_back_and_nothing_else() -> None:
    before = Changes().adding(entry("c"), ()).changing(settings("c"), {"priority": 1})
    after = before.removing({"c"}, NAMES).removing({"b"}, NAMES)
    assert after.restoring({"c"}, before) == before.removing({"b"}, NAMES)
    assert after.restoring({"b"}, before) == before.removing({"c"}, NAMES)


LEVELS = st.fixed_dictionaries(
    {},
    optional={
        "slo.ttft": st.floats(0.001, 100),
        "slo.tpot": st.floats(0.001, 100),
        "priority": st.integers(-100, 100),
        "share": st.floats(0.01, 10),
        "limits.running": st.integers(1, 100),
        "limits.waiting": st.integers(0, 100),
        "limits.queue_seconds": st.none() | st.floats(0.1, 100),
        "pinned": st.booleans(),
    },
)


@given(LEVELS)
def test_levels_and_keys_are_inverse(values: Levels) -> None:
    assert said(keys_of(values)) == values
    model = with_levels(settings("a"), values)
    assert levels_of(model) == levels_of(settings("a")) | values


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from("abcd"), st.sampled_from("xy")),
        st.tuples(st.just("remove"), st.sampled_from("abcd"), st.none()),
        st.tuples(st.just("change"), st.sampled_from("abcd"), LEVELS),
    ),
    max_size=12,
)


@given(STEPS)
def test_a_restart_serves_what_was_served(steps: list[tuple[str, str, object]]) -> None:
    """Against a model: a dictionary of what a server serves. The file has a and b."""
    file = (entry("a"), entry("b"))
    names = {"a", "b"}
    live = {n: settings(n) for n in names}
    changes = Changes()
    for what, name, how in steps:
        if what == "add" and name not in live:
            live[name] = ModelSettings(name=name, path=str(how))
            changes = changes.adding(entry(name, str(how)), ())
        elif what == "remove" and name in live:
            del live[name]
            changes = changes.removing({name}, names)
        elif what == "change" and name in live:
            assert isinstance(how, dict)
            changes = changes.changing(live[name], how)
            live[name] = with_levels(live[name], how)
    reread = Changes.model_validate_json(changes.model_dump_json(exclude_unset=True))
    assert reread == changes
    entries = merged(file, reread)
    models = [e.settings(e.path or "", ()) for _, e in entries.entries]
    now, kept, notes = changed(models, entries.changes)
    assert {m.name: m for m in now} == live
    assert (entries.notes, notes) == ((), ())
    assert kept.changed == changes.changed


def test_live_keys_refuse_what_is_not_live() -> None:
    with pytest.raises(ValueError, match="dtype"):
        LiveKeys.model_validate({"dtype": "float32"})
    with pytest.raises(ValueError, match="context"):
        LiveKeys.model_validate({"limits": {"context": 3}})


def test_an_added_model_gives_way_to_the_names_that_the_file_has_by_now() -> None:
    changes = Changes().adding(entry("c", aliases=["gpt-4o"]), ())
    assert served(changes) == ["a", "a-lora", "b", "c"]
    result = merged((*FILE, entry("d", aliases=["gpt-4o"])), changes)
    assert [e.name for _, e in result.entries] == ["a", "a-lora", "b", "d"]
    assert result.changes == Changes(version=1)
    assert result.notes == ("c was added; the fleet file has a model that is called gpt-4o, too",)
