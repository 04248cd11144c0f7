"""Plug-ins: how they are found, what is said when they cannot be, and what they may do to a request."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import sys
from pathlib import Path

import msgspec
import pytest

from tests.fakes import pb_utils
from tests.fakes.harness import Harness, Step
from triton_lifecycle import plugins
from triton_lifecycle.chat import Conversation
from triton_lifecycle.config import Config, EventDriven, Handler, Monitoring, Pipeline, Stage, TimeoutHandling
from triton_lifecycle.context import Input, Metadata, Wants
from triton_lifecycle.engine import Chunk, open_engine
from triton_lifecycle.errors import ConfigError, InvalidInput, Unsupported
from triton_lifecycle.events import TYPES, Finished, Received
from triton_lifecycle.manager import Manager
from triton_lifecycle.simulation.virtual_time import run

EXAMPLES = Path(__file__).parents[2] / "docs" / "plugins"
HERE = __name__
BUILT_IN = ("receive", "preprocess", "schedule", "execute", "postprocess", "respond")
TOKENS = [Step("token", 0.1)] * 3


def harness(stages, **pipeline):
    config = Config(timeout_handling=TimeoutHandling(enabled=False), pipeline=Pipeline(stages=stages, **pipeline))
    made = Harness(config)
    made.engine.scripts.update({"p": TOKENS, "hang": TOKENS})
    return made


def asked(prompt="p", **parameters):
    return pb_utils.InferenceRequest({"text_input": prompt, "stream": True}, parameters, "r")


def problems_of(*stages):
    async def scenario():
        with pytest.raises(ConfigError) as caught:
            harness(stages)
        return caught.value.message

    return run(scenario)


async def before(ctx):
    """Do nothing: a stage before the engine."""


async def after(ctx, chunk):
    """Do nothing: a stage behind the engine."""
    return chunk


async def hang(ctx):
    if ctx.input.source == "hang":
        await asyncio.Event().wait()


async def hang_behind(ctx, chunk):
    await asyncio.Event().wait()


async def own_timeout(ctx):
    raise TimeoutError("mine")


async def refuse(ctx):
    raise Unsupported("text_input: not today")


async def wrong(ctx, chunk):
    return "text"


async def gone(ctx, chunk):
    return None if not chunk.finished else chunk


async def engine_of_its_own(ctx, deliver):
    ctx.output.sequences = []
    chunk = msgspec.structs.replace(Chunk((), finished=True))
    await deliver(chunk)


def blocking(ctx):
    """Not a coroutine function."""


class Configured:
    made = 0

    def __init__(self, word: str = "x", *, often: int = 1) -> None:
        type(self).made += 1
        self.word = word * often

    async def __call__(self, ctx):
        ctx.input = msgspec.structs.replace(ctx.input, source=self.word)


# ---- the list


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        (("receive", "preproces", *BUILT_IN[2:]), "'preproces' is neither built in.*did you mean 'preprocess'"),
        ((*BUILT_IN, "respond"), "'respond' is named 2 times"),
        (("receive", "execute", "execute", "postprocess", "respond"), "'execute' is named 2 times"),
        (("receive", "preprocess", "schedule", "postprocess", "respond"), "'execute' is missing"),
        (BUILT_IN[1:], "nothing would read the request"),
        (("receive", "schedule", "execute", "postprocess", "respond"), "nothing would prepare the request"),
        (BUILT_IN[:-1], "nothing would answer"),
        (("receive", "preprocess", "schedule", "execute", "respond"), "nothing would make responses"),
        (("preprocess", "receive", *BUILT_IN[2:]), "'receive' must come before 'preprocess'"),
        (
            ("receive", "preprocess", "execute", "schedule", "postprocess", "respond"),
            "'schedule' must come before 'exec",
        ),
        (("receive", "preprocess", "respond", "execute", "postprocess"), "'respond' must come after 'execute'"),
        ((*BUILT_IN[:4], "respond", "postprocess"), "'postprocess' must come before 'respond'"),
        ((Stage(use="receive", settings={"a": 1}), *BUILT_IN[1:]), "'receive' is built in"),
        ((*BUILT_IN[:4], Stage(use=f"{HERE}:before", role="execute"), *BUILT_IN[4:]), "one execute stage"),
        ((f"{HERE}:after", *BUILT_IN), "must take the context alone; it takes"),
        ((*BUILT_IN, f"{HERE}:before"), "must take the context and a chunk; it takes"),
        ((f"{HERE}:blocking", *BUILT_IN), r"it is no coroutine function \(async def\)"),
        ((f"{HERE}:TOKENS", *BUILT_IN), "cannot be called"),
        ((f"{HERE}:befor", *BUILT_IN), "has no 'befor'; did you mean 'before'"),
        (("no_such_module:x", *BUILT_IN), "No module named 'no_such_module'; modules are looked for"),
        ((":x", *BUILT_IN), "is not of the form 'module:attribute'"),
        ((Stage(use=f"{HERE}:before", settings={"a": 1}), *BUILT_IN), r"pipeline\.stages\.0\.settings: .* takes none"),
        ((Stage(use=f"{HERE}:Configured", settings={"wrod": 1}), *BUILT_IN), "cannot be made with these settings"),
    ],
)
def test_a_list_that_cannot_work_is_refused_when_it_is_loaded(stages, words):
    """The message says what is wrong, where, and what would be right."""
    assert re.search(words, problems_of(*stages)), problems_of(*stages)


def test_everything_that_is_wrong_is_told_at_once():
    """Stages and handlers, order and names, in one error."""

    def start():
        config = Config(
            pipeline=Pipeline(stages=("preprocess", f"{HERE}:nothing", "receive", "postpro", "execute", "respond")),
            event_driven=EventDriven(handlers=(Handler(use="nowhere:x", events=("Finishd",)),)),
        )
        manager = Manager(config, open_engine("simulated", {}, ""), "m", "1", pb_utils)
        manager.start()

    with pytest.raises(ConfigError) as caught:
        start()
    for words in (
        "pipeline.stages: 'receive' must come before 'preprocess'",
        "nothing would make responses",
        f"'{HERE}' has no 'nothing'",
        "pipeline.stages.3: 'postpro' is neither built in",
        "did you mean 'postprocess'?",
        "event_driven.handlers.0.events: there is no event 'Finishd'; did you mean 'Finished'?",
        "event_driven.handlers.0: 'nowhere:x' cannot be imported",
    ):
        assert words in caught.value.message


@pytest.mark.parametrize(
    "stages",
    [
        BUILT_IN,
        ("receive", "preprocess", "execute", "postprocess", "respond"),
        ("receive", "schedule", "preprocess", *BUILT_IN[3:]),
        (f"{HERE}:before", *BUILT_IN, f"{HERE}:after"),
        (f"{HERE}:before", *BUILT_IN[1:]),
        (*BUILT_IN[:5], f"{HERE}:after"),
    ],
)
def test_lists_that_can_work_are_taken(stages):
    """Removed, inserted before and behind, and replaced stages."""

    async def scenario():
        harness(stages)

    run(scenario)


def test_a_module_that_fails_while_it_is_imported_is_named(tmp_path, monkeypatch):
    """Whatever it raises, the model does not load, and the reason is told."""
    for name, body in (("syntax_bad", "def"), ("exits", "raise SystemExit(3)"), ("fails", "1 / 0")):
        (tmp_path / f"{name}.py").write_text(body)
        monkeypatch.syspath_prepend(tmp_path)
        with pytest.raises(ConfigError, match=f"importing '{name}:x' failed"):
            plugins.load(f"{name}:x", {}, group=plugins.STAGES, where="here")


def test_an_entry_point_of_an_installed_package_is_a_name(tmp_path, monkeypatch):
    """A package that offers a stage and a handler is used by their names."""
    info = tmp_path / "offers-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: offers\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[{plugins.STAGES}]\nquiet = {HERE}:before\n[{plugins.HANDLERS}]\nlisten = offered:listen\n"
    )
    (tmp_path / "offered.py").write_text("heard = []\nlisten = heard.append\n")
    monkeypatch.syspath_prepend(tmp_path)

    async def scenario():
        made = harness(("receive", "quiet", *BUILT_IN[1:]))
        request = asked()
        await made.serve(request)
        assert request.sender.text() == "012"

    run(scenario)
    [handler] = plugins.load_handlers([Handler(use="listen", events=("Finished",))])
    assert (handler.name, handler.types) == ("listen", (Finished,))
    assert "did you mean 'quiet'?" in problems_of("receive", "quite", *BUILT_IN[1:])


def test_the_models_own_folder_is_looked_in_last(tmp_path, monkeypatch):
    """A module beside model.json is found; it does not hide an installed one of the same name."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "beside_the_model.py").write_text("async def stage(ctx): ...\n")
    (tmp_path / "json.py").write_text("raise ImportError\n")
    plugins.look_in(tmp_path)
    plugins.look_in(tmp_path)
    assert sys.path.count(str(tmp_path)) == 1
    assert callable(plugins.load("beside_the_model:stage", {}, group=plugins.STAGES, where="here"))
    assert plugins.load("json:loads", {}, group=plugins.STAGES, where="here") is json.loads


# ---- at work


def test_a_class_is_made_once_with_its_settings():
    """Not for each request."""

    async def scenario():
        Configured.made = 0
        stage = Stage(use=f"{HERE}:Configured", settings={"word": "p", "often": 1})
        made = harness(("receive", stage, *BUILT_IN[1:]))
        for _ in range(3):
            request = asked("something else")
            await made.serve(request)
            assert request.sender.text() == "012"
        assert Configured.made == 1

    run(scenario)


@pytest.mark.parametrize(
    "stages", [("receive", "X:hang", *BUILT_IN[1:]), (*BUILT_IN[:4], "X:hang_behind", *BUILT_IN[4:])]
)
def test_a_plug_in_that_hangs_fails_its_own_request_after_its_time(stages):
    """The error names the plug-in and the limit; everything is given back."""

    async def scenario():
        made = harness(tuple(stage.replace("X", HERE) for stage in stages), plugin_timeout=2.0)
        began = asyncio.get_running_loop().time()
        request = asked("hang")
        await made.serve(request)
        assert 2.0 <= asyncio.get_running_loop().time() - began < 2.5
        [error] = request.sender.errors
        assert error.code() == pb_utils.TritonError.INTERNAL
        assert error.message().startswith(f"plugin_failed: stage '{HERE}:hang")
        assert "did not return within 2 s (pipeline.plugin_timeout)" in error.message()
        assert (made.admission.out, made.engine.known, len(made.contexts)) == (0, {}, 0)
        assert made.contexts.counts["failed"] == 1

    run(scenario)


def test_a_cancel_ends_a_plug_in_that_hangs():
    """It ends as a cancel, not as the plug-in's failure."""

    async def scenario():
        made = harness(("receive", f"{HERE}:hang", *BUILT_IN[1:]))
        request = asked("hang", timeout_ms=300)
        await made.serve(request)
        assert request.sender.errors[0].message().startswith("total_timeout")

    run(scenario)


@pytest.mark.parametrize(
    ("stage", "start"),
    [
        ("refuse", "unsupported: text_input: not today"),
        ("own_timeout", f"plugin_failed: stage '{HERE}:own_timeout' failed with TimeoutError"),
    ],
)
def test_what_a_plug_in_raises_is_told_under_its_name_or_as_it_is(stage, start):
    """Our own errors go to the caller as they are; a TimeoutError of its own is not taken for the limit."""

    async def scenario():
        made = harness(("receive", f"{HERE}:{stage}", *BUILT_IN[1:]))
        request = asked()
        await made.serve(request)
        assert request.sender.errors[0].message().startswith(start)

    run(scenario)


def test_what_a_stage_hands_on_must_be_what_the_next_one_takes():
    """The plug-in that returned it is named, not the stage that cannot take it."""

    async def scenario():
        for stages, takes in (
            ((*BUILT_IN[:4], f"{HERE}:wrong", *BUILT_IN[4:]), "Chunk"),
            ((*BUILT_IN[:5], f"{HERE}:wrong", "respond"), "Response"),
        ):
            made = harness(stages)
            request = asked()
            await made.serve(request)
            assert f"stage '{HERE}:wrong' returned str; the stage behind it takes {takes}" in (
                request.sender.errors[0].message()
            )

    run(scenario)


def test_a_stage_may_hold_chunks_back():
    """None means that nothing goes further; the rest of the answer does."""

    async def scenario():
        made = harness((*BUILT_IN[:4], f"{HERE}:gone", *BUILT_IN[4:]))
        request = asked()
        await made.serve(request)
        assert request.sender.text() == "2"

    run(scenario)


def test_a_plug_in_may_stand_in_the_place_of_execute():
    """With role: execute, and without any engine request."""

    async def scenario():
        made = harness((*BUILT_IN[:3], Stage(use=f"{HERE}:engine_of_its_own", role="execute"), *BUILT_IN[4:]))
        request = asked()
        await made.serve(request)
        assert request.sender.errors == []
        assert made.contexts.counts["completed"] == 1

    run(scenario)


# ---- handlers


heard = []


def listener(event):
    """Hear."""
    heard.append(event)


def test_a_handler_of_the_configuration_hears_its_events():
    """In a manager as Triton runs it; the state shows its counts by its name, and what was published."""
    config = Config(
        event_driven=EventDriven(handlers=(Handler(use=f"{HERE}:listener", events=("Received", "Finished")),)),
        timeout_handling=TimeoutHandling(enable_intelligent_timeout=False),
        monitoring=Monitoring(metrics_enabled=False),
    )
    heard.clear()
    manager = Manager(config, open_engine("simulated", {}, ""), "m", "1", pb_utils)
    manager.start()
    try:
        request = pb_utils.InferenceRequest({"text_input": "hi"}, {"max_tokens": 2})
        manager.submit([request])
        for _ in range(500):
            if request.sender.finals:
                break
            asyncio.run(asyncio.sleep(0.02))
        state = manager.state()
    finally:
        manager.stop()
    assert [type(event) for event in heard] == [Received, Finished]
    assert state["handlers"][f"{HERE}:listener"]["handled"] == 2
    assert state["published"] == {"Received": 1, "Finished": 1}
    assert state["sinks"] == {}


def test_more_handlers_than_may_exist_are_refused():
    """The message names the key."""
    config = Config(event_driven=EventDriven(max_event_handlers=1, handlers=(Handler(use=f"{HERE}:listener"),) * 2))
    with pytest.raises(ConfigError, match="max_event_handlers"):
        Manager(config, open_engine("simulated", {}, ""), "m", "1", pb_utils).start()


def test_a_handler_of_the_wrong_shape_is_refused():
    """It takes one argument, the event."""
    with pytest.raises(ConfigError, match="must take one argument, the event"):
        plugins.load_handlers([Handler(use=f"{HERE}:after")])


def test_without_a_list_a_handler_hears_everything():
    """All event types."""
    [handler] = plugins.load_handlers([Handler(use=f"{HERE}:listener")])
    assert handler.types == TYPES


# ---- the examples


def example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Asked:
    """As much of a context as the examples touch."""

    def __init__(self, source, priority=0):
        self.input = Input(source=source, parameters={}, wants=Wants(), exclude_prompt=True)
        self.metadata = Metadata(caller_id="", stream=True, priority=priority)


def test_example_redact():
    """Addresses and card numbers go, in prompts and in conversations; the rest stays."""
    redact = example("redact").Redact()
    ctx = Asked("mail ann@example.org, card 4111 1111 1111 1111, year 2026")
    asyncio.run(redact(ctx))
    assert ctx.input.source == "mail [redacted], card [redacted], year 2026"
    ctx = Asked(Conversation([{"role": "user", "content": "I am bob@b.de"}]))
    asyncio.run(redact(ctx))
    assert ctx.input.source.messages == [{"role": "user", "content": "I am [redacted]"}]


def test_example_route_by_length():
    """Long prompts come later and may get an adapter; a caller's own priority stays; too long ones are refused."""
    route = example("route_by_length").RouteByLength(short=5, longest=20, adapter="long")
    short, long, own = Asked("short"), Asked("rather long"), Asked("rather long", priority=3)
    for ctx in (short, long, own):
        asyncio.run(route(ctx))
    assert [ctx.metadata.priority for ctx in (short, long, own)] == [0, 10, 3]
    assert (short.input.parameters, long.input.parameters) == ({}, {"lora_name": "long"})
    with pytest.raises(InvalidInput, match="takes 20 characters, found 21"):
        asyncio.run(route(Asked("x" * 21)))


def test_example_audit_log(tmp_path):
    """A line for each event, with who and how, in files of bounded size."""
    audit = example("audit_log").AuditLog(str(tmp_path / "audit.log"), max_bytes=1000)

    async def scenario():
        for number in range(100):
            await audit(Received(request_id=f"r{number}", seq=0, at=0.0, caller_id="me", model="m", wall=5.0))
            await audit(Finished(request_id=f"r{number}", seq=1, at=0.0, finish_reason="stop", output_tokens=7))

    asyncio.run(scenario())
    lines = [json.loads(line) for line in (tmp_path / "audit.log").read_text().splitlines()]
    assert lines[-1] == {"event": "Finished", "request": "r99", "slug": None, "tokens": 7}
    assert lines[-2] == {"event": "Received", "request": "r99", "caller": "me", "unix": 5.0}
    assert len(list(tmp_path.iterdir())) == 10
    for handler in audit._log.handlers:
        handler.close()
