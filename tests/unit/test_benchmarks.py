"""The pure parts of the benchmarks: figures, targets, the table, and the lives that logs are made of."""

from __future__ import annotations

import time

import pytest
from msgspec.structs import replace

from events.envelope import Recorded
from infra.clock import SystemClock
from infra.journal.memory import MemoryJournal
from projections.boot import fold_fleet
from tests.benchmarks.figures import (
    BEGIN,
    END,
    HEADINGS,
    Figure,
    middle,
    paired,
    percentile,
    table,
    with_figures,
)
from tests.benchmarks.lives import write_log
from tests.benchmarks.pace import paced


def figure(value: float, *, ratio_at_least: float | None = None, value_below: float | None = None) -> Figure:
    return Figure(
        benchmark="b",
        name="n",
        value=value,
        unit="ms",
        baseline=10.0,
        baseline_name="bare",
        ratio_at_least=ratio_at_least,
        value_below=value_below,
    )


def test_a_target_on_the_ratio_is_met_from_the_ratio_on() -> None:
    assert figure(7.0, ratio_at_least=0.7).met == "yes"
    assert figure(6.99, ratio_at_least=0.7).met == "NO"


def test_a_target_may_also_be_a_ratio_not_to_exceed() -> None:
    met, missed = replace(figure(12.5), ratio_at_most=1.25), replace(figure(12.51), ratio_at_most=1.25)
    assert (met.met, missed.met) == ("yes", "NO")
    assert replace(met, baseline=None).met == "NO"
    assert met.target == "ratio <= 1.25"


def test_a_target_on_the_value_is_met_below_it_only() -> None:
    assert figure(9.99, value_below=10).met == "yes"
    assert figure(10.0, value_below=10).met == "NO"


def test_a_figure_without_a_target_is_neither_met_nor_missed() -> None:
    assert figure(1.0).met == ""


def test_a_figure_without_a_baseline_never_meets_a_ratio() -> None:
    assert Figure(benchmark="b", name="n", value=1.0, unit="ms", ratio_at_least=0.1).met == "NO"


def test_the_middle_of_rounds_is_their_median_with_the_extremes() -> None:
    assert middle([3.0, 1.0, 10.0]) == (3.0, (1.0, 10.0))


def test_a_ratio_of_paired_rounds_is_not_moved_by_a_round_that_was_slow_on_both_sides() -> None:
    assert paired([100.0, 10.0, 90.0], [200.0, 20.0, 180.0]) == 0.5
    assert (
        Figure(
            benchmark="b",
            name="n",
            value=90.0,
            unit="/s",
            baseline=20.0,
            paired_ratio=0.5,
            ratio_at_least=0.7,
        ).met
        == "NO"
    )


def test_a_percentile_is_a_value_that_was_measured() -> None:
    values = [float(number) for number in range(1, 101)]
    assert (percentile(values, 0.5), percentile(values, 0.99), percentile([4.0], 0.99)) == (51.0, 100.0, 4.0)
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


def test_the_table_has_a_row_for_each_figure_and_labels_what_was_only_pretended() -> None:
    pretended = Figure(benchmark="demand", name="to spawn", value=2.0, unit="ms", scripted=True)
    lines = table([figure(5.0, ratio_at_least=0.7), pretended]).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "---" not in line]
    assert cells[0] == list(HEADINGS)
    assert cells[1] == ["b", "n", "5 ms", "", "10 (bare)", "0.50", "ratio >= 0.7", "NO"]
    assert cells[2][1:3] == ["to spawn [scripted]", "2 ms"]


def test_new_figures_take_the_place_of_the_old_ones_and_nothing_else() -> None:
    text = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert with_figures(text, "new") == f"before\n{BEGIN}\nnew\n{END}\nafter\n"
    with pytest.raises(ValueError, match="no place for figures"):
        with_figures("nothing here", "new")


def test_paced_calls_keep_their_order_and_say_when_they_were_due() -> None:
    results = paced(1000, 20, time.monotonic)
    dues = [due_s for _, due_s in results]
    assert dues == sorted(dues)
    assert all(began_s >= due_s for began_s, due_s in results)


def test_a_written_log_holds_exactly_the_lives_asked_for() -> None:
    journal = MemoryJournal(SystemClock())
    last = write_log(journal, dead=100, live=7)
    facts: list[Recorded] = list(journal.replay())
    state = fold_fleet(facts)
    assert (state.last_sequence, len(facts)) == (last, last)
    assert len(state.vms) == 7
    assert {vm.phase for vm in state.vms.values()} == {"registered"}
    assert sum(fact.tag == "vm.reaped" for fact in facts) == 100


def test_a_log_that_will_not_take_the_lives_ends_the_benchmark() -> None:
    with pytest.raises(RuntimeError, match="would not take"):
        write_log(MemoryJournal(SystemClock(), limit_bytes=1000), dead=100, live=0)
