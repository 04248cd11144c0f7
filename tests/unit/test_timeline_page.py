"""The timeline's page, looked at in a real browser: large, hostile, by mouse and by keyboard, light and dark."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.fakes.browser import chromium
from tests.fakes.recordings import busy_run, repeated, write
from triton_lifecycle import events as ev
from triton_lifecycle.recording import read
from triton_lifecycle_client.timeline import page as page_writer
from triton_lifecycle_client.timeline import view

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

EVENTS = 100_000
EVIL = (
    "</script><script>document.title = 'taken'</script>",
    "<img src=x onerror=\"document.title='taken'\">",
    "${document.title='taken'} $style \\u003c \u2028\u2029 \u202eesrever {{7*7}}",
    "'\"`&lt;b&gt;<!--",
)
READING = "getImageData"
"""What the browser says about this test's own way of looking at a canvas."""

Open = Callable[..., "Page"]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, view.View]:
    """Return a page of 100,000 events and what it shows."""
    folder = tmp_path_factory.mktemp("page")
    source = write(folder / "events.jsonl", repeated(busy_run(3, 300), EVENTS))
    shown = view.of(read(source), "events.jsonl")
    page_writer.write(folder / "page.html", shown)
    return folder / "page.html", shown


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a page whose every text tries to become more than text."""
    events: list[ev.Event] = []
    for number, text in enumerate(EVIL):
        begin = 1.0 + number
        events += [
            ev.Received(f"{number}{text}", 0, begin, text, text, 1.8e9),
            ev.StageDone(f"{number}{text}", 1, begin + 0.1, text, 0.1),
            ev.Prepared(f"{number}{text}", 2, begin + 0.2, text, 5, False, 0, text, None, 1, 5),
            ev.Admitted(f"{number}{text}", 3, begin + 0.2, 0, {text: 5.0}),
            ev.Retrying(f"{number}{text}", 4, begin + 0.3, 1, text),
            ev.DeadlineMoved(f"{number}{text}", 5, begin + 0.3, begin + 5, text),
            ev.TimedOut(f"{number}{text}", 6, begin + 0.5, text, text, 0),
        ]
    folder = tmp_path_factory.mktemp("hostile")
    source = write(folder / "events.jsonl", events)
    page_writer.write(folder / "page.html", view.of(read(source), EVIL[0]))
    return folder / "page.html"


@pytest.fixture(scope="module")
def browser(large: object, hostile: object) -> Iterator[Browser]:
    """Run the browser, once the recordings are made: their virtual clock needs the thread's event loop."""
    with chromium() as running:
        yield running


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    """Return a function that opens a page; it must fetch nothing and raise nothing."""
    faults: list[str] = []
    opened: list[Page] = []

    def go(path: Path, **options: object) -> Page:
        page = browser.new_page(viewport={"width": 1440, "height": 860}, **options)
        opened.append(page)
        page.on("pageerror", lambda error: faults.append(f"raised: {error}"))
        page.on("console", lambda message: READING in message.text or faults.append(f"said: {message.text}"))
        page.on("request", lambda sent: sent.url == path.as_uri() or faults.append(f"fetched: {sent.url}"))
        page.set_default_timeout(20_000)
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready-ms]")
        return page

    yield go
    for page in opened:
        page.close()
    assert faults == []


def shown(page: Page) -> int:
    return int(page.evaluate("document.documentElement.dataset.shown"))


def settle(page: Page, count: int) -> None:
    """Wait until the page shows as many requests."""
    page.wait_for_function("count => document.documentElement.dataset.shown == count", arg=count)


def colors(page: Page, canvas: str) -> Counter[str]:
    """Return how many pixels a canvas has of each opaque colour."""
    found = page.evaluate(
        """id => {
          const canvas = document.getElementById(id);
          const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
          const counts = {};
          for (let i = 0; i < data.length; i += 4) {
            if (data[i + 3] !== 255) continue;
            const color = `${data[i]},${data[i + 1]},${data[i + 2]}`;
            counts[color] = (counts[color] || 0) + 1;
          }
          return counts;
        }""",
        canvas,
    )
    return Counter(found)


def color_of(page: Page, name: str) -> str:
    code = page.evaluate("name => getComputedStyle(document.documentElement).getPropertyValue(name).trim()", name)
    return ",".join(str(int(code[at : at + 2], 16)) for at in (1, 3, 5))


def test_a_hundred_thousand_events(large: tuple[Path, view.View], open_page: Open):
    """The page is there within five seconds, and each filter and each key answers within a quarter of one."""
    path, view_ = large
    assert view_.events >= EVENTS
    began = time.monotonic()
    page = open_page(path)
    loaded = time.monotonic() - began
    assert shown(page) == len(view_.stories)
    filters = []
    for text in ("caller", "r1", "timed_out", "no such thing", ""):
        page.fill("#search", text)
        wanted = [s for s in view_.stories if text in f"{s.id} {s.caller_id} {s.slug} {s.status}".lower()]
        settle(page, len(wanted))
        filters.append(float(page.evaluate("document.documentElement.dataset.filterMs")))
    drawn = page.evaluate(
        """async () => {
          const times = [];
          for (let i = 0; i < 20; i += 1) {
            const began = performance.now();
            document.getElementById("scroll").scrollTop = i * 1500;
            const key = i % 2 ? "+" : "ArrowRight";
            document.body.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
            await new Promise(done => requestAnimationFrame(() => setTimeout(done)));
            times.push(performance.now() - began);
          }
          return Math.max(...times);
        }"""
    )
    print(f"{view_.events} events: loaded in {loaded:.2f} s, filters ≤ {max(filters):.0f} ms, frames ≤ {drawn:.0f} ms")
    assert loaded < 5.0
    assert max(filters) < 250
    assert drawn < 250


def test_what_is_drawn_is_what_was_recorded(large: tuple[Path, view.View], open_page: Open):
    """The canvases show the phases in their colours; waiting and running are drawn over time."""
    page = open_page(large[0])
    page.select_option("#order", "duration")
    page.locator("#scroll").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("z")
    page.wait_for_timeout(200)
    rows, depth = colors(page, "rows"), colors(page, "depth")
    assert rows[color_of(page, "--p4")] > 500, "decode"
    assert depth.keys() & {color_of(page, "--p4"), color_of(page, "--p2")}
    page.select_option("#order", "queue")
    page.keyboard.press("Home")
    page.locator("#scroll").focus()
    page.keyboard.press("Home")
    page.keyboard.press("z")
    page.wait_for_timeout(200)
    assert colors(page, "rows")[color_of(page, "--p2")] > 500, "queue"


def test_filters_narrow_together(large: tuple[Path, view.View], open_page: Open):
    """Status, reason and words hold at the same time; an empty result offers the way back."""
    path, view_ = large
    page = open_page(path)
    for status in {story.status for story in view_.stories} - {"rejected"}:
        page.click(f"[data-status={status}]")
    settle(page, sum(story.status == "rejected" for story in view_.stories))
    page.select_option("#slug", "queue_full")
    full = [story for story in view_.stories if story.slug == "queue_full"]
    settle(page, len(full))
    page.fill("#search", full[0].id)
    settle(page, 1)
    page.fill("#search", "nothing is called so")
    settle(page, 0)
    page.click("#clear")
    settle(page, len(view_.stories))


def test_a_click_shows_a_request(large: tuple[Path, view.View], open_page: Open):
    """Its phases, facts, tokens and deadline moves are there; the overview's drag chooses a span."""
    path, view_ = large
    story = next(s for s in view_.stories if s.status == "completed" and len(s.deadlines) > 5)
    page = open_page(path)
    page.fill("#search", story.id)
    page.wait_for_timeout(300)
    page.mouse.click(600, page.locator("#rows").bounding_box()["y"] + 10)
    page.wait_for_selector("#details:visible")
    text = page.inner_text("#details")
    for part in (story.caller_id, story.id, "decode", "prefill", "output tokens", str(story.output_tokens)):
        assert part in text
    assert f"Deadline moves ({len(story.deadlines)})" in text
    assert colors(page, "spark").total() > 50
    box = page.locator("#depth").bounding_box()
    page.mouse.move(box["x"] + 400, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + 500, box["y"] + 50, steps=4)
    page.mouse.up()
    page.wait_for_timeout(200)
    assert colors(page, "depth")[color_of(page, "--accent")] > 20


def test_by_keyboard_alone(large: tuple[Path, view.View], open_page: Open):
    """Search, choose, read and close without a mouse; a reader of the screen is told what was chosen."""
    path, view_ = large
    page = open_page(path)
    page.keyboard.press("/")
    page.keyboard.type(view_.stories[5].id)
    settle(page, 1)
    page.keyboard.press("Escape")
    page.keyboard.press("ArrowDown")
    page.wait_for_selector("#details:visible")
    told = page.text_content("#live") or ""
    assert view_.stories[5].caller_id in told
    assert page.evaluate("document.activeElement.id") == "scroll"
    page.keyboard.press("Escape")
    page.wait_for_selector("#details", state="hidden")
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll("button, input, select, [tabindex]")].filter(e =>
             !(e.textContent.trim() || e.getAttribute("aria-label") || e.labels?.length)).map(e => e.outerHTML)"""
    )
    assert unnamed == []


def test_light_and_dark(large: tuple[Path, view.View], open_page: Open):
    """The page follows the system's choice, and a key turns it; text stays readable in both."""
    backgrounds = []
    for scheme in ("light", "dark"):
        page = open_page(large[0], color_scheme=scheme)
        backgrounds.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        for front in ("--text", "--soft"):
            assert contrast(color_of(page, front), color_of(page, "--panel")) >= 4.5, (scheme, front)
        page.keyboard.press("t")
        assert page.evaluate("document.documentElement.dataset.theme") != scheme
    assert backgrounds[0] != backgrounds[1]


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of two colours, as WCAG counts it."""

    def light(color: str) -> float:
        parts = [int(part) / 255 for part in color.split(",")]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    brighter, darker = sorted((light(one), light(other)), reverse=True)
    return (brighter + 0.05) / (darker + 0.05)


def test_hostile_texts_stay_texts(hostile: Path, open_page: Open):
    """Ids, models, tenants, reasons and messages that are markup are shown letter by letter and run nothing."""
    page = open_page(hostile)
    assert shown(page) == len(EVIL)
    page.locator("#scroll").focus()
    for text in EVIL:
        page.keyboard.press("ArrowDown")
        found = page.text_content("#details") or ""
        assert found.count(text) >= 5, text
        assert page.text_content("#name") == text
    assert page.title() == "Request timeline"
    assert page.evaluate("document.querySelectorAll('script').length") == 2
    assert page.evaluate("document.querySelectorAll('img').length") == 0
    assert page.evaluate("document.getElementById('slug').options.length") == len(EVIL) + 1
