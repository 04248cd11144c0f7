"""The benchmark's figures and tables."""

from __future__ import annotations

import io
import json

import pytest
from load.overhead.figures import (
    BARE,
    GRPC,
    HTTP,
    TRITONSERVER,
    Cell,
    SimulatedSetup,
    Work,
    cpu_rows,
    engine_rows,
    place_rows,
    simulated_row,
)
from load.overhead.measure import Sample
from load.overhead.processes import Serving
from load.overhead.report import Findings, aims, as_json, environment, show
from rich.console import Console


def _sample(rate: float, *, first_ms: float = 10.0, responses: int = 100) -> Sample:
    return Sample(100 / rate, 0.001, 2, 100, responses, [first_ms / 1e3] * 2, [0.03] * 98)


def _cells() -> list[Cell]:
    rates = {1: (30.0, 29.4), 2: (40.0, 38.0), 3: (20.0, 19.8)}
    cells = []
    for number, (bare, ours) in rates.items():
        for concurrency in (1, 32):
            cells.append(Cell(BARE, concurrency, number, _sample(bare, first_ms=10), 0.01))
            cells.append(Cell(GRPC, concurrency, number, _sample(ours, first_ms=12 + number), 0.02))
    return cells


def test_ratios_compare_the_same_round_only():
    """The ratio is taken round by round and then summed up, so a drifting machine does not show in it."""
    row = next(row for row in engine_rows(_cells()) if row.target == GRPC and row.concurrency == 32)
    assert row.ratio is not None
    assert row.ratio.median == pytest.approx(0.98)
    assert (row.ratio.low, row.ratio.high) == (pytest.approx(0.95), pytest.approx(0.99))
    assert row.first_added is not None
    assert row.first_added.median == pytest.approx(4.0)
    assert row.tokens_per_response == 1.0


def test_the_baseline_has_no_ratio_to_itself():
    """Bare vLLM's lines carry figures but no comparison."""
    row = engine_rows(_cells())[0]
    assert (row.target, row.ratio, row.first_added) == (BARE, None, None)
    assert row.gap_p50 == pytest.approx(30.0)


def test_an_interrupted_round_is_left_out_of_the_comparison():
    """A cell whose partner is missing counts for itself only."""
    cells = [*_cells(), Cell(GRPC, 1, 4, _sample(10.0), 0.0)]
    row = next(row for row in engine_rows(cells) if row.target == GRPC and row.concurrency == 1)
    assert row.rounds == 4
    assert row.ratio is not None
    assert row.ratio.low == pytest.approx(0.95)


def test_cpu_is_per_token_and_split():
    """CPU seconds become microseconds per token, for both processes and each."""
    works = [Work(HTTP, 1, _sample(50.0), Serving(tritonserver=0.01, stub=0.02))]
    (row,) = cpu_rows(works)
    assert row.both.median == pytest.approx(300)
    assert row.stub.median == pytest.approx(200)
    assert row.tritonserver.median == pytest.approx(100)


def test_serving_time_is_a_difference():
    """The CPU time of a measurement is what was used since it began, by thread too; a thread may have begun since."""
    used = Serving(5.0, 7.0, {"loop": 4.0, "new": 0.5}) - Serving(4.0, 4.5, {"loop": 3.0, "gone": 1.0})
    assert (used.tritonserver, used.stub, used.both) == (1.0, 2.5, 3.5)
    assert used.threads == {"loop": 1.0, "new": 0.5}


def test_places_are_in_order_of_their_cost_and_tritonserver_last():
    """Each thread has its CPU per token and per request, by transport."""
    works = [Work(GRPC, 1, _sample(50.0), Serving(0.03, 0.02, {"watch": 0.002, "loop": 0.01}))]
    requests = [Work(HTTP, 1, _sample(50.0), Serving(0.01, 0.02, {"loop": 0.05}))]
    rows = place_rows(works, requests)
    assert [row.place for row in rows] == ["loop", "watch", TRITONSERVER]
    assert {transport: spread.median for transport, spread in rows[0].per_token.items()} == {GRPC: pytest.approx(100)}
    assert rows[0].per_request[HTTP].median == pytest.approx(500)
    assert rows[1].per_request[HTTP].median == 0
    assert rows[2].per_token[GRPC].median == pytest.approx(300)
    assert place_rows([], []) == []


def test_merging_shows_in_the_simulated_line():
    """Tokens and responses per second give the tokens per response."""
    row = simulated_row([Work(GRPC, 1, _sample(1000.0, responses=20), Serving(0.05, 0.08))], SimulatedSetup(2e3, 8, 2))
    assert row is not None
    assert (row.tokens_per_response, row.responses_per_s.median) == (5.0, pytest.approx(200))
    assert row.stub_share == pytest.approx(0.8)
    assert simulated_row([], None) is None


def test_aims_are_judged_by_the_median():
    """Each aim that the run can judge gives one line that says met or missed."""
    lines = aims(engine_rows(_cells()))
    assert len(lines) == 2
    assert lines[0].endswith("aim ≤ +5 ms: met")
    assert "98.0 (95.0…99.0) % of bare; aim ≥ 97%: met" in lines[1]


def _full() -> Findings:
    used = Serving(0.01, 0.02, {"send-lane": 0.015})
    works = [Work(target, 1, _sample(50.0), used) for target in (GRPC, HTTP)]
    return Findings(environment(), _cells(), works, works, works[:1], SimulatedSetup(50_000, 64, 1))


def test_all_tables_are_shown():
    """Every part prints its table, with the official backend's figures marked as not of this run."""
    out = io.StringIO()
    show(_full(), Console(file=out, width=80))
    text = out.getvalue()
    for words in (
        "Ours against the bare engine",
        "CPU per streamed token",
        "building and sending responses",
        "Simulated engine over 64",
        "* Triton's official",
    ):
        assert words in text


def test_nothing_measured_prints_no_table():
    """An early interruption prints the environment and no empty table."""
    out = io.StringIO()
    show(Findings(environment()), Console(file=out, width=200))
    assert "cores" in out.getvalue()
    assert "─" not in out.getvalue()


def test_json_holds_figures_and_measurements_without_bulk():
    """The JSON has the rows and each measurement, but not every single time."""
    document = json.loads(as_json(_full()))
    assert len(document["engine"]) == 4
    assert document["cpu"][0]["both"]["median"] == pytest.approx(300)
    assert document["simulated"]["setup"]["streams"] == 64
    assert document["measurements"]["engine"][0]["sample"]["tokens_per_s"] == pytest.approx(30.0)
    assert "gaps" not in document["measurements"]["engine"][0]["sample"]
