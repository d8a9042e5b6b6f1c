"""Presets are compared on equal terms, in every benchmark's tables."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ballast.policy.presets import resolve
from benchmarks import arbiter_live, arbiter_sim, fleet, mirage_live, sim_fidelity
from benchmarks.contenders import SHARINGS, Comparison, Contender, defaults
from benchmarks.experiments import EXPERIMENTS
from benchmarks.mirage_cases import COMPARED

TABLES = {
    "fleet": defaults(*(row for p in fleet.COMPARED_PRESETS for row in fleet.rows_of(p))),
    "sim_fidelity": sim_fidelity.COMPARED,
    "sim_fidelity, quick": sim_fidelity.QUICK,
    "arbiter_sim": arbiter_sim.COMPARED,
    "arbiter_live": arbiter_live.COMPARED,
    **{name: experiment.rows for name, experiment in EXPERIMENTS.items()},
    "mirage, pool": SHARINGS["pool"],
    "mirage, shares": SHARINGS["shares"],
    "mirage, turns": SHARINGS["pool"].on(temporal=1, quantum=0.25, preemptive=1),
}


def options_of(table: Comparison, row: str) -> dict[str, float]:
    """All options that a row runs with, defaults included."""
    return resolve(table.rows[row].preset, table.options(row)).values


def compared(table: Comparison) -> Iterator[tuple[str, str]]:
    """Rows of different presets that a table sets against each other."""
    for of, over in table.pairs():
        if table.rows[of].preset != table.rows[over].preset:
            yield of, over


@pytest.mark.parametrize("name", TABLES)
def test_presets_that_are_compared_have_equal_options(name: str) -> None:
    table = TABLES[name]
    pairs = list(compared(table))
    assert pairs
    for of, over in pairs:
        a, b = options_of(table, of), options_of(table, over)
        assert {o: (a[o], b[o]) for o in a.keys() & b.keys() if a[o] != b[o]} == {}, (of, over)


def test_what_is_no_ablation_is_compared_with_every_other() -> None:
    table = EXPERIMENTS["prism_8"].rows
    main = {row for row, contender in table.rows.items() if contender.ablates is None}
    assert len(main) == 6
    assert set(table.pairs()) == {
        *((a, b) for a in main for b in main - {a}),
        *((row, "prism") for row in table.rows.keys() - main),
    }


def test_a_table_of_unequal_presets_cannot_be_made() -> None:
    """The tables that there were: `mirage` pooled, and what it was compared with not."""
    unequal = {
        "recompute": Contender("recompute", {"pooled": 0}),
        "mirage": Contender("mirage", {"pooled": 1}),
    }
    with pytest.raises(ValueError, match="differ in pooled"):
        Comparison({}, unequal)
    with pytest.raises(ValueError, match="kvswap differ in cap"):
        Comparison({}, {"uncapped": Contender("mirage", {"cap": 0}), "kvswap": Contender("kvswap")})
    ablated = Contender("mirage", {"cap": 0}, ablates="mirage")
    Comparison(
        {}, {"mirage": Contender("mirage"), "capless": ablated, "kvswap": Contender("kvswap")}
    )


def test_terms_hold_for_the_presets_that_have_them() -> None:
    table = defaults("swap", "recompute").on(quantum=3.0, temporal=1.0)
    assert table.options("swap") == {"quantum": 3.0}
    assert table.options("recompute") == {"quantum": 3.0, "temporal": 1.0}


def test_curves_set_like_beside_like() -> None:
    """Both sides of a ratio are rows that may be compared, on the same terms and memory; the two
    that compare terms or memory are of one preset."""
    for name, ((row, *terms), (other, *other_terms)) in COMPARED.items():
        if name in ("pool", "no_shortage"):
            assert row == other
            assert sum(a != b for a, b in zip(terms, other_terms, strict=True)) == 1
            continue
        assert terms == other_terms
        assert (row, other) in set(SHARINGS[str(terms[0])].pairs())


def test_live_variants_are_compared_on_equal_terms() -> None:
    variants = mirage_live.MAIN
    bases = {name: mirage_live.base_of(name, variants) for name in variants}
    assert bases["recompute"] == "recompute, shares"
    assert bases["mirage, shares"] == "recompute, shares"
    for name, base in bases.items():
        if base is None or name == "recompute":
            continue
        of, over = variants[name], variants[base]
        assert of.sharing == over.sharing
        assert (of.row, over.row) in set(of.comparison.pairs())
    assert {v.row for v in variants.values()} >= {"kvswap"}
