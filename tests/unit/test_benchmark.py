"""The benchmark without a server: plans, statistics, rules, storage, retries, and the page in a real browser."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
from aiohttp import web
from load.benchmark import (
    asking,
    capacity,
    cli,
    compare,
    figures,
    gate,
    options,
    page,
    plan,
    published,
    result,
    servers,
)
from load.benchmark.asking import Heard
from load.benchmark.drive import Load
from load.benchmark.options import Options, TargetSpec
from load.benchmark.plan import Cell, Planned
from load.benchmark.records import CellEnd, Folder, Measured, Record, Run
from load.benchmark.servers import owned
from load.benchmark.statistics import Histogram, interval, jain, ratio, resampled, share_difference, total, wilson
from load.benchmark.targets.foreign import OpenAiTarget, TritonTarget
from load.benchmark.targets.lifecycle import LifecycleTarget
from typer.testing import CliRunner

from tests.fakes.browser import chromium
from tests.waiting import until
from triton_lifecycle.errors import InvalidInput, LifecycleError, QueueFull
from triton_lifecycle.simulation import virtual_time

CELL = Cell("ours", "normal", 0, 30.0)
EVIL = "</td><script>document.title='taken'</script>"


def record(number: int, **changes: Any) -> Record:
    """Return a complete answer of 8 tokens that took a second."""
    facts: dict[str, Any] = {
        "number": number, "tenant": number % 4, "due": number * 0.1, "sent": number * 0.1, "first": number * 0.1 + 0.2,
        "end": number * 0.1 + 1.0, "outcome": "complete", "slug": None, "attempts": 1, "refusals": 0, "tokens": 8,
    }  # fmt: skip
    return Record(**(facts | changes))


def failed(number: int, slug: str = "total_timeout") -> Record:
    return record(number, outcome="failed", slug=slug, tokens=2)


def found(cell: Cell, records: list[Record], *, whole: bool = True) -> result.Found:
    measured = Measured(cell, records, CellEnd(gaps={0: 3}, made=1000, lag_p99=0.001) if whole else None)
    return result.Found(measured, figures.of(measured))


def run_of(*cells: result.Found, name: str = "this") -> result.Result:
    kinds = dict.fromkeys(item.cell.target for item in cells)
    asked = Options(targets=tuple(TargetSpec(kind) for kind in kinds), scenarios=("normal",))
    return result.Result(name, Run(options=asked, capacity=4.0, capacity_of="ours"), list(cells))


def times(scenario: str, count: int = 4000, per_second: float = 10.0) -> list[Planned]:
    return list(plan.requests(Options(num_requests=count), Cell("ours", scenario, 0, 30.0), per_second))


def test_the_same_seed_makes_the_same_load():
    """All targets get the same words, lengths and moments; another seed makes others."""
    assert times("extreme", 50) == times("extreme", 50)
    other = list(plan.requests(Options(num_requests=50, seed=1), Cell("vllm", "extreme", 0, 30.0), 10.0))
    assert other != times("extreme", 50)


@pytest.mark.parametrize(("scenario", "load"), [("normal", 0.5), ("high", 0.9), ("extreme", 0.9), ("long", 0.5)])
def test_loads_are_multiples_of_capacity(scenario: str, load: float):
    """Each scenario sends exactly as many requests as wanted, in order, at its mean rate."""
    planned = times(scenario)
    assert len(planned) == 4000
    assert all(one.at <= other.at for one, other in pairwise(planned))
    assert 4000 / planned[-1].at == pytest.approx(load * 10, rel=0.06)


def test_extreme_has_bursts_and_long_has_long_answers():
    """Bursts reach three times the capacity; every tenth answer of `long` is eight times longer, no other."""
    seconds: dict[int, int] = {}
    for item in times("extreme", per_second=100.0):
        seconds[int(item.at)] = seconds.get(int(item.at), 0) + 1
    assert sorted(seconds.values())[-4] > 250
    lengths = [item.ask.output_tokens for item in times("long", 40)]
    assert sorted(set(lengths)) == [64, 512]
    assert lengths.count(512) == 4


@pytest.mark.parametrize(
    ("read", "text", "said"),
    [
        (options.targets, "nobody", "--target"),
        (options.targets, "sglang", "sglang=http://HOST:PORT"),
        (options.targets, "sglang=host:1", "over HTTP"),
        (options.scenarios, "hard", "--scenario"),
        (lambda text: options.whole("--concurrency", text), "1,2.5", "whole"),
        (lambda text: options.numbers("--timeout", text), "1;2", "commas"),
        (lambda text: Options(output_len=text).checked(), "many", "--output-len"),
        (lambda text: Options(timeout=(float(text),)).checked(), "nan", "--timeout"),
        (lambda text: Options(targets=options.targets(text)).checked(), "ours,ours", "twice"),
        (gate.parse, "goodput=1", "METRIC<NUMBER"),
        (gate.parse, "speed<1", "known: goodput"),
    ],
)
def test_wrong_options_are_named(read: Any, text: str, said: str):
    """A wrong value is refused with the option's name and what it takes."""
    with pytest.raises(InvalidInput, match=said.replace("<", ".")):
        read(text)


def test_wilson_and_newcombe():
    """Known values: 0 of 60, 5 of 100, and Newcombe's own example (56/70 against 48/80)."""
    assert wilson(0, 60).high == pytest.approx(0.0602, abs=1e-4)
    assert (wilson(5, 100).low, wilson(5, 100).high) == pytest.approx((0.0215, 0.1118), abs=1e-4)
    difference = share_difference(wilson(48, 80), wilson(56, 70))
    assert (difference.value, difference.low, difference.high) == pytest.approx((0.2, 0.0524, 0.3339), abs=1e-4)
    assert (wilson(0, 0).low, wilson(0, 0).high) == (0.0, 1.0)


def test_bootstrap_tells_a_difference_from_chance():
    """The interval of a ratio holds 1 for two samples of the same, and not for one that is half as large again."""
    dice = random.Random(1)
    one, same, more = ([dice.gauss(mean, 1) for _ in range(400)] for mean in (10, 10, 15))
    sums = {name: (sum(data), resampled(data, total)) for name, data in (("one", one), ("same", same), ("more", more))}
    chance, real = ratio(sums["one"], sums["same"]), ratio(sums["one"], sums["more"])
    assert chance.low < 1 < chance.high
    assert 1.4 < real.low < 1.5 < real.high < 1.6
    assert interval(5.0, np.array([4.0, 6.0])).value == 5.0


def test_jain_and_histogram():
    """Fairness is 1 for all alike and 1/n for one that has all; a quantile is right within 2 %."""
    assert jain([0.5, 0.5]) == pytest.approx(1)
    assert jain([1, 0, 0, 0]) == pytest.approx(0.25)
    histogram = Histogram()
    for number in range(1, 1001):
        histogram.add(number / 1000)
    assert histogram.quantile(0.5) == pytest.approx(0.5, rel=0.02)
    assert histogram.quantile(0.99) == pytest.approx(0.99, rel=0.02)
    assert Histogram().quantile(0.5) is None


def test_figures_of_a_cell():
    """Failures, rates, waste, retries, reasons and fairness are those of the records."""
    records = [record(n, attempts=2, refusals=1) if n % 4 == 1 else record(n) for n in range(90)]
    records += [failed(n, "queue_full") for n in range(90, 100)]
    got = figures.of(Measured(CELL, records, CellEnd(gaps={}, made=800, lag_p99=0.2)))
    assert (got.asked, got.complete, got.slugs) == (100, 90, {"queue_full": 10})
    assert got.failed.value == pytest.approx(0.1)
    assert got.goodput.value == pytest.approx(90 / 10.9)
    assert got.goodput.low < got.goodput.value < got.goodput.high
    assert got.wasted_received == pytest.approx(20 / 740)
    assert got.wasted_made == pytest.approx(1 - 720 / 800)
    assert (got.refusals, got.retries) == (23, 23)
    assert got.first["p50"] == pytest.approx(0.2)
    assert 0.99 < got.fairness < 1
    assert got.tool_was_late
    assert sum(part.arrived for part in got.slices) * got.seconds / len(got.slices) == pytest.approx(100)


def test_capacity_counts_parts():
    """An answer that lies half within the window counts half: waves of equal answers give the true rate."""
    records = [record(n, sent=float(n // 4) * 2, end=float(n // 4) * 2 + 2) for n in range(20)]
    assert capacity.served(records, 1.0, 9.0) == pytest.approx(2.0)
    assert capacity.served([failed(1)], 0.0, 1.0) == 0


def test_an_interrupted_cell_is_not_whole(tmp_path: Path):
    """What was found stays, a line that was cut off does not count, and only a finished cell is whole."""
    folder = Folder(tmp_path / "run")
    run = Run(options=Options(scenarios=("normal",)), command="c", capacity=2.0)
    folder.write_run(run)
    assert folder.run() == run
    with folder.writer(CELL) as writer:
        writer.add(record(1))
        writer.add(record(0))
    path = tmp_path / "run" / "cells" / f"{CELL.id}.jsonl"
    path.write_bytes(path.read_bytes() + b'{"record":{"num')
    measured = folder.measured(CELL)
    assert measured is not None
    assert [item.number for item in measured.records] == [0, 1]
    assert measured.end is None
    with folder.writer(CELL) as writer:
        writer.add(record(5))
        writer.finish(CellEnd(gaps={3: 1}, made=None, lag_p99=0.0))
    measured = folder.measured(CELL)
    assert measured is not None
    assert (len(measured.records), measured.end and measured.end.gaps) == (1, {3: 1})
    got = result.read(folder.path)
    assert [item.figures.whole for item in got.cells] == [True]
    (tmp_path / "r.json").write_bytes(result.as_json(result.document(got)))
    assert result.read_json(tmp_path / "r.json").cells[0].figures == got.cells[0].figures
    assert result.as_csv(got).decode().splitlines()[1].startswith("ours,normal,0,30.0,1,1,0.0")


def test_gate():
    """Rates are judged against the same cell of the baseline, shares as they are; nothing to judge is an error."""
    good = [record(n) for n in range(100)]
    bad = [record(n) for n in range(90)] + [failed(n) for n in range(90, 100)]

    def document(records: list[Record], cell: Cell = CELL) -> result.Document:
        item = found(cell, records)
        return result.Document(run_of(item).run, [result.Summary(cell, item.figures)])

    rules = [gate.parse("goodput<0.95"), gate.parse("failed > 5%"), gate.parse("first_p99>1.2")]
    verdicts = [item.broken for item in gate.judge(rules, document(bad), document(good))]
    assert verdicts == [True, True, False]
    assert not any(item.broken for item in gate.judge(rules, document(good), document(good)))
    with pytest.raises(InvalidInput, match="no cell of this run"):
        gate.judge(rules[:1], document(good), document(good, Cell("vllm", "normal", 0, 30.0)))
    with pytest.raises(InvalidInput, match="--baseline"):
        gate.check(rules, baseline=False)
    gate.check(rules[1:2], baseline=False)


def test_comparison():
    """Two cells of the same load: a true difference is told, chance is not."""
    ours = found(CELL, [record(n) for n in range(200)])
    same = found(Cell("off", "normal", 0, 30.0), [record(n) for n in range(200)])
    worse = found(Cell("vllm", "normal", 0, 30.0), [record(n) if n % 3 else failed(n) for n in range(200)])
    verdicts = {(d.other, d.metric): d.verdict for d in compare.targets(run_of(ours, same, worse))}
    assert verdicts["off", "failed"] == verdicts["off", "goodput"] == "no difference shown"
    assert verdicts["vllm", "failed"] == verdicts["vllm", "goodput"] == "worse"
    assert compare.runs([run_of(ours)]) == []
    changes = compare.runs([run_of(ours), run_of(ours, name="before")])
    assert {(d.one, d.other) for d in changes} == {("this", "before")}


def test_verdicts_of_the_failure_table():
    """An aim is met, missed, or met without proof when so few requests cannot show it; others have no aim."""
    high = Cell("ours", "high", 0, 30.0)
    lines = published.table(
        run_of(
            found(high, [record(n) for n in range(100)]),
            found(Cell("vllm", "high", 0, 30.0), [failed(0)]),
            found(CELL, [failed(0), record(1)]),
        )
    )
    entries = {(line.scenario, entry.target): entry.verdict for line in lines for entry in line.entries}
    assert entries == {("normal", "ours"): "missed", ("high", "ours"): "met, not proven", ("high", "vllm"): None}


class Scripted:
    """A target that answers after a second, or never; it counts who is there at once."""

    metrics_url = None

    def __init__(self) -> None:
        self.live = self.most = 0

    async def wait_ready(self, limit_s: float) -> None:
        pass

    async def ask(self, planned: Planned, limit_s: float, tenant: str, heard: Heard) -> None:
        self.live += 1
        self.most = max(self.most, self.live)
        try:
            heard.attempt()
            if planned.ask.number % 5 == 4:
                error = QueueFull("full", retry_after=1)
                heard.failed(error)
                raise error
            for _ in range(planned.ask.output_tokens - (planned.ask.number == 3)):
                await asyncio.sleep(1 / 8 if planned.ask.number != 2 else 100)
                heard.chunk()
                heard.counted(heard.chunks)
        finally:
            self.live -= 1

    async def close(self) -> None:
        pass


def drive(cell: Cell, count: int) -> tuple[list[Record], Scripted, Load]:
    target, records = Scripted(), []
    load = Load(target, cell, 4, records.append)
    asked = Options(num_requests=count, output_len="8")
    virtual_time.run(load.run, plan.requests(asked, cell, 2.0))
    return sorted(records, key=lambda item: item.number), target, load


def test_open_loop_in_virtual_time():
    """Requests go out when they are due, whatever became of the others; each ends by its deadline with its reason."""
    records, _, load = drive(Cell("ours", "normal", 0, 5.0), 10)
    assert [item.slug for item in records] == [
        None, None, "caller_gave_up", asking.SHORT, "queue_full", None, None, None, None, "queue_full",
    ]  # fmt: skip
    assert all(item.sent == pytest.approx(item.due, abs=0.01) for item in records)
    assert records[2].end - records[2].sent == pytest.approx(5.0, abs=0.01)
    assert records[0].end - records[0].sent == pytest.approx(1.0, abs=0.01)
    assert (records[4].refusals, records[4].attempts) == (1, 1)
    assert (load.lag.quantile(0.99) or 0) < 0.01
    assert load.gaps.quantile(0.5) == pytest.approx(0.125, rel=0.03)


def test_closed_loop_in_virtual_time():
    """So many callers and no more ask at once, until all requests have been asked."""
    records, target, _ = drive(Cell("ours", "closed", 3, 5.0), 20)
    assert (len(records), target.most, target.live) == (20, 3, 0)


async def models(_: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "its-name"}]})


@asynccontextmanager
async def http_server(path: str, handler: Any) -> AsyncIterator[str]:
    application = web.Application()
    application.router.add_post(path, handler)
    application.router.add_get("/v1/models", models)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def openai_answer(tokens: int, *, finish: bool = True) -> bytes:
    choice = {"index": 0, "text": " x", "finish_reason": None}
    events: list[Any] = [{"choices": [choice]} for _ in range(tokens)]
    if finish:
        events[-1] = {"choices": [choice | {"finish_reason": "length"}]}
    events.append({"choices": [], "usage": {"completion_tokens": tokens}})
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"


async def _ask(answers: list[web.Response], limit_s: float = 5.0) -> tuple[Record, list[Any]]:
    bodies: list[Any] = []

    async def handler(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        return answers[min(len(bodies), len(answers)) - 1]

    item = next(plan.requests(Options(num_requests=1, output_len="4"), CELL, 1.0))
    async with http_server("/v1/completions", handler) as url:
        target = OpenAiTarget(url, "smollm2")
        try:
            await target.wait_ready(5)
            return (await asking.ask(target, item, 0.0, limit_s, 0))[0], bodies
        finally:
            await target.close()


def stream(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="text/event-stream")


def test_openai_servers_get_our_retry_policy():
    """A refusal is tried again after its Retry-After, within the deadline; the model is the one that is there."""
    refusal = web.Response(status=429, headers={"Retry-After": "0.1"})
    got, bodies = asyncio.run(_ask([refusal, stream(openai_answer(4))]))
    assert (got.outcome, got.attempts, got.refusals, got.tokens) == ("complete", 2, 1, 4)
    assert bodies[0] == bodies[1]
    assert (bodies[0]["model"], bodies[0]["max_tokens"]) == ("its-name", 4)
    later = web.Response(status=503, headers={"Retry-After": "8"})
    got, _ = asyncio.run(_ask([later]))
    assert (got.outcome, got.attempts, got.end < 1e9) == ("failed", 1, True)


@pytest.mark.parametrize(
    ("answer", "slug"),
    [
        (openai_answer(4, finish=False), "protocol_error"),
        (openai_answer(2), "answer_too_short"),
        (b'data: {"error": {"message": "engine is dead"}}\n\n', "internal"),
    ],
)
def test_half_an_answer_is_a_failure(answer: bytes, slug: str):
    """An answer that is cut, too short, or ends in an error event is not complete."""
    got, _ = asyncio.run(_ask([stream(answer)]))
    assert (got.outcome, got.slug) == ("failed", slug)


def test_unreachable_servers():
    """Nobody there: every attempt is made, then the failure has its name; being not ready is told."""

    async def go() -> Record:
        target = TritonTarget("http://127.0.0.1:9", "m", None)
        item = next(plan.requests(Options(num_requests=1), CELL, 1.0))
        try:
            with pytest.raises(LifecycleError, match="not ready"):
                await target.wait_ready(0.3)
            return (await asking.ask(target, item, 0.0, 10.0, 0))[0]
        finally:
            await target.close()

    got = asyncio.run(go())
    assert (got.slug, got.attempts, got.refusals) == ("server_unreachable", 3, 0)


@pytest.mark.parametrize(("hint", "sent"), [("0.01", 3), ("8", 1)])
def test_an_attempt_of_ours_counts_when_it_is_sent(hint: str, sent: int):
    """One that the policy allows and the deadline forbids was never made; a refusal counts each time."""
    bodies: list[Any] = []

    async def handler(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        return web.json_response({"error": f"queue_full: 64 wait; retry after {hint} s"}, status=503)

    async def go() -> Record:
        item = next(plan.requests(Options(num_requests=1, output_len="4"), CELL, 1.0))
        async with http_server("/v2/models/m/generate_stream", handler) as url:
            target = LifecycleTarget(url, "m")
            try:
                return (await asking.ask(target, item, 0.0, 5.0, 0))[0]
            finally:
                await target.close()

    got = asyncio.run(go())
    assert (got.slug, got.attempts, got.refusals, len(bodies)) == ("queue_full", sent, sent, sent)


@pytest.mark.parametrize("killed", [True, False])
def test_nothing_of_a_foreign_server_is_left(tmp_path: Path, *, killed: bool):
    """Killed (-9) or ended in order: also what left its group, as an engine's process may, is gone with it."""
    below = "import subprocess, sys, time; sleep = [sys.executable, '-c', 'import time; time.sleep(600)']"
    code = f"{below}; print(subprocess.Popen(sleep, start_new_session=True).pid, flush=True); time.sleep(600)"
    with owned([sys.executable, "-c", code], tmp_path / "log", state=tmp_path) as process:
        engine = psutil.Process(int(until(lambda: (told := (tmp_path / "log").read_text()).endswith("\n") and told)))
        assert len(list((tmp_path / "servers").iterdir())) == 1
        if killed:
            process.kill()
            process.wait()
    assert not engine.is_running()
    assert process.returncode is not None
    assert list((tmp_path / "servers").iterdir()) == []


def test_servers_are_started_alike(tmp_path: Path):
    """vLLM's command has the arguments of our model.json; the switches and admission stand in our configuration."""
    arguments = servers.engine_arguments(
        {"model": "/w", "enforce_eager": True, "max_num_seqs": 64, "x_y": False, "n": None}
    )
    assert arguments == ["--model", "/w", "--enforce-eager", "--max-num-seqs", "64", "--no-x-y"]
    source = servers.model_folder("smollm2")
    on = servers.lifecycle_config(Options(), source)["request_lifecycle"]
    off = servers.lifecycle_config(Options(event_driven=False, intelligent_timeout=False), source)["request_lifecycle"]
    assert (on["event_driven"]["enabled"], off["event_driven"]["enabled"]) == (True, False)
    assert on["timeout_handling"]["enable_intelligent_timeout"] is True
    assert on["admission"] == {
        "max_waiting_requests": 128, "refuse_unreachable": True, "earliest_deadline_first": True,
    }  # fmt: skip
    assert off["admission"]["refuse_unreachable"] is off["admission"]["earliest_deadline_first"] is False
    mine = tmp_path / "mine.yaml"
    mine.write_text("request_lifecycle:\n  event_driven: { enabled: false }\n  timeout_handling:\n", encoding="utf-8")
    given = servers.lifecycle_config(Options(server_config=str(mine)), source)["request_lifecycle"]
    assert given == {"event_driven": {"enabled": False}, "timeout_handling": {}}, "as it is"
    switched = Options(server_config=str(mine), event_driven=True, intelligent_timeout=False)
    assert servers.lifecycle_config(switched, source)["request_lifecycle"] == {
        "event_driven": {"enabled": True},
        "timeout_handling": {"enable_intelligent_timeout": False},
    }
    servers.copy_model(servers.model_folder("simulated"), tmp_path / "simulated", None, lambda _: None)
    assert not (tmp_path / "simulated" / servers.SERVER_CONFIG).exists()
    with pytest.raises(InvalidInput, match="--model nothing"):
        servers.model_folder("nothing")


def test_the_page_in_a_browser(tmp_path: Path):
    """The page fetches nothing, runs nothing, shows every figure and plot, and takes hostile names as text."""
    closed = [
        found(Cell(target, "closed", callers, limit), [record(n) for n in range(callers * 4)])
        for target in ("ours", "vllm")
        for callers in (10, 50, 100)
        for limit in (10.0, 30.0)
    ]
    ours = found(CELL, [record(n) for n in range(200)])
    vllm = found(
        Cell("vllm", "normal", 0, 30.0), [record(n) if n % 4 else failed(n, EVIL) for n in range(200)], whole=False
    )
    this = run_of(ours, vllm, *closed, name=EVIL)
    asked = msgspec.structs.replace(this.run.options, timeout=(10.0, 30.0), concurrency=(10, 50, 100))
    this = msgspec.structs.replace(this, run=msgspec.structs.replace(this.run, options=asked, command=EVIL))
    judgements = [gate.Judgement("goodput<0.95", EVIL, 0.5, True)]
    path = tmp_path / "report.html"
    path.write_text(page.render(this, [run_of(ours, name="before")], judgements), encoding="utf-8")
    faults: list[str] = []
    with chromium() as browser:
        shown = browser.new_page(viewport={"width": 1440, "height": 900})
        shown.on("pageerror", lambda error: faults.append(f"raised: {error}"))
        shown.on("console", lambda message: faults.append(f"said: {message.text}"))
        shown.on("request", lambda sent: sent.url == path.as_uri() or faults.append(f"fetched: {sent.url}"))
        shown.goto(path.as_uri())
        assert "0 %" in shown.inner_text("[data-cell='ours/normal']")
        assert "met" in shown.inner_text("[data-cell='ours/normal']")
        assert "25 %" in shown.inner_text("[data-cell='vllm/normal']")
        assert "interrupted" in shown.inner_text("[data-cell='vllm/normal']")
        assert shown.locator("#cells tbody tr").count() == 2 + len(closed)
        assert f"{EVIL} 50" in shown.inner_text("#reasons")
        assert "worse" in shown.inner_text("#targets")
        assert "before against" in shown.inner_text("#runs")
        assert "failed" in shown.inner_text("#rules")
        # Six curves against concurrency, six against the time limit for each number of callers, one over time a cell.
        assert shown.locator("svg.plot").count() == 6 + 3 * 6 + 2 + len(closed)
        dots = shown.locator("svg.plot").first.locator("circle")
        boxes = [dots.nth(index).bounding_box() for index in range(dots.count())]
        frame = shown.locator("svg.plot").first.bounding_box()
        assert dots.count() == 12
        assert all(frame["x"] < box["x"] < frame["x"] + frame["width"] for box in boxes)
        assert all(frame["y"] < box["y"] < frame["y"] + frame["height"] for box in boxes)
        assert shown.locator("script").count() == 0
        assert shown.title() == f"Benchmark: {EVIL}"
    assert faults == []


def test_a_page_without_results(tmp_path: Path):
    """A run that was interrupted before anything ended has a page that says so."""
    assert "Nothing was measured yet." in page.render(run_of(), [], [])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--target", "nobody"], "nobody"),
        (["--fail-if", "goodput<0.9"], "baseline"),
        (["--resume", "nowhere"], "nowhere"),
        (["--enable-event-driven", "perhaps"], "true"),
        (["--out", "taken"], "--resume"),
        (["--server-config", "nowhere.yaml"], "no file"),
        (["--server-config", "wrong.yaml"], "event_drivn"),
        (["--server-config", "list.yaml"], "request_lifecycle"),
    ],
)
def test_wrong_usage_starts_nothing(arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A wrong option is named before anything is started, and a folder that holds a run is not written over."""
    monkeypatch.chdir(tmp_path)
    Folder(tmp_path / "taken").write_run(Run(options=Options()))
    (tmp_path / "wrong.yaml").write_text("request_lifecycle: { event_drivn: {} }", encoding="utf-8")
    (tmp_path / "list.yaml").write_text("[1, 2]", encoding="utf-8")
    before = (tmp_path / "taken" / "run.json").read_bytes()
    done = CliRunner().invoke(cli.app, arguments)
    assert done.exit_code == 2
    assert said in done.stderr
    assert (tmp_path / "taken" / "run.json").read_bytes() == before
