"""Plug-ins on the real server: the examples of docs/plugins.md as they are, and plug-ins that misbehave."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from tests.e2e.conftest import REPOSITORY, ROOT
from tests.waiting import in_time, until
from triton_lifecycle.errors import BY_SLUG
from triton_lifecycle.launcher.server import StartFailed, TritonServer
from triton_lifecycle_client import Client

EXAMPLES = ROOT / "docs" / "plugins"
MISBEHAVING = '''
"""Plug-ins that raise, hang, and fail on what was made."""

import asyncio

import msgspec

from triton_lifecycle.errors import Unsupported


async def misbehave(ctx):
    """Do what the prompt says."""
    match ctx.input.source.split()[0]:
        case "raise":
            raise ValueError("secret detail")
        case "hang":
            await asyncio.Event().wait()
        case "refuse":
            raise Unsupported("text_input: not on a Wednesday")


async def shout(ctx, response):
    """Make the answer loud."""
    texts = [text.upper() for text in response.outputs["text_output"]]
    return msgspec.structs.replace(response, outputs=response.outputs | {"text_output": texts})


def broken(event):
    """Fail on every event."""
    raise RuntimeError
'''


def model(repository: Path, name: str, lifecycle: dict) -> Path:
    """Make a simulated model with the examples beside its model.py; return its version's folder."""
    version = repository / name / "1"
    shutil.copytree(REPOSITORY / "simulated" / "1", version, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "simulated" / "config.pbtxt", version.parent)
    for example in EXAMPLES.glob("*.py"):
        shutil.copy(example, version)
    (version / "misbehaving.py").write_text(MISBEHAVING, encoding="utf-8")
    document = yaml.safe_dump({"request_lifecycle": lifecycle})
    (version.parent / "request_lifecycle.yaml").write_text(document, encoding="utf-8")
    return version


def stages(*before: object, after: tuple[object, ...] = ()) -> list[object]:
    """Return the usual list with some behind 'receive', and some between 'postprocess' and 'respond'."""
    return ["receive", *before, "preprocess", "schedule", "execute", "postprocess", *after, "respond"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where the models and what they write lie."""
    return tmp_path_factory.mktemp("plugins")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[TritonServer]:
    """Run a server with a model of the examples and one of plug-ins that misbehave."""
    repository = folder / "repository"
    route = {"use": "route_by_length:RouteByLength", "settings": {"short": 40, "longest": 400}}
    audit = {"use": "audit_log:AuditLog", "settings": {"path": str(folder / "audit.log")}}
    audit["events"] = ["Received", "Finished", "Failed", "Cancelled", "TimedOut", "Rejected"]
    model(
        repository,
        "examples",
        {
            "pipeline": {"stages": stages("redact:Redact", route)},
            "event_driven": {"handlers": [audit], "recorder": {"path": str(folder / "events.jsonl")}},
        },
    )
    model(
        repository,
        "misbehaving",
        {
            "pipeline": {
                "stages": stages("misbehaving:misbehave", after=("misbehaving:shout",)),
                "plugin_timeout": 2.0,
            },
            "event_driven": {"handlers": [{"use": "misbehaving:broken"}]},
        },
    )
    with TritonServer(repository, log_path=folder / "triton.log") as running:
        running.wait_ready(60)
        yield running
    assert running.leftovers == []


def client(server: TritonServer, model: str) -> Client:
    return Client(server.grpc_url, model=model, protocol="grpc")


def test_a_prompt_is_redacted_before_anything_reads_it(server: TritonServer):
    """The prompt that the answer repeats, which is what the engine was given, holds no address any more."""
    body = {"text_input": "write to ann@example.org now", "exclude_input_in_output": False, "max_tokens": 4}
    answer = httpx.post(f"http://{server.http_url}/v2/models/examples/generate", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["text_output"].startswith("write to [redacted] now")


def test_long_prompts_get_another_priority_or_an_answer_at_once(server: TritonServer, folder: Path):
    """The priority is in the request's own events; what is too long is refused with the plug-in's own words."""
    with client(server, "examples") as examples:
        for name, prompt in (("short", "a b c"), ("long", "a b c " * 10)):
            examples.generate(prompt, max_tokens=2, request_id=f"route-{name}")
        with pytest.raises(BY_SLUG["invalid_input"], match="this model takes 400 characters, found 600"):
            examples.generate("a b c " * 100, max_tokens=2)
    until(lambda: len(priorities(folder)) == 2, despite=(ValueError, KeyError))
    assert priorities(folder) == {"route-short": 0, "route-long": 10}


def priorities(folder: Path) -> dict[str, int]:
    """Return the priority with which each of the requests was admitted, as the recorder has it."""
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    names = {line["request_id"]: line["caller_id"] for line in lines if line["event"] == "Received"}
    admitted = {names[line["request_id"]]: line["priority"] for line in lines if line["event"] == "Admitted"}
    return {name: priority for name, priority in admitted.items() if name.startswith("route-")}


def test_the_audit_log_has_a_line_for_each_beginning_and_end(server: TritonServer, folder: Path):
    """Who asked and how it ended, and no word of the prompt."""
    with client(server, "examples") as examples:
        examples.generate("confidential words", max_tokens=3, ignore_eos=True, request_id="audited")
    path = folder / "audit.log"
    found: list[dict] = []

    def written() -> bool:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        [mine] = [line["request"] for line in lines if line.get("caller") == "audited"]
        found[:] = [line for line in lines if line["request"] == mine]
        return len(found) == 2

    until(written, despite=(ValueError,))
    assert [line["event"] for line in found] == ["Received", "Finished"]
    assert found[1]["tokens"] == 3
    assert "confidential" not in path.read_text()


@pytest.mark.parametrize(
    ("prompt", "slug", "words"),
    [
        ("raise it", "plugin_failed", "stage 'misbehaving:misbehave' failed with ValueError"),
        ("hang on", "plugin_failed", "stage 'misbehaving:misbehave' did not return within 2 s"),
        ("refuse it", "unsupported", "not on a Wednesday"),
    ],
)
def test_a_plug_in_costs_its_own_request_alone(server: TritonServer, prompt: str, slug: str, words: str):
    """It raises, hangs or refuses: the answer names it, and a request beside it is served meanwhile and after."""
    with client(server, "misbehaving") as asked:

        def refused() -> str:
            with pytest.raises(BY_SLUG[slug]) as caught:
                asked.generate(prompt, max_tokens=4)
            return str(caught.value)

        said = in_time(refused, 6)
        assert words in said
        assert "secret detail" not in said
        good = asked.generate("be good", max_tokens=4, ignore_eos=True)
        assert good.text
        assert good.text == good.text.upper()
        assert asked.state().live == 0


def test_a_list_that_cannot_work_is_refused_with_everything_that_is_wrong(tmp_path: Path):
    """The model does not load; the server's log names each problem and the nearest right name."""
    lifecycle = {
        "pipeline": {"stages": stages("redakt:Redact", "audit_log:AuditLog")},
        "event_driven": {"handlers": [{"use": "redact:Redakt", "events": ["Finishd"]}]},
    }
    model(tmp_path / "repository", "wrong", lifecycle)
    server = TritonServer(tmp_path / "repository", log_path=tmp_path / "triton.log")
    server.start()
    with pytest.raises(StartFailed):
        server.wait_ready(60)
    log = server.log()
    for words in (
        "No module named 'redakt'",
        "audit_log:AuditLog",
        "there is no event 'Finishd'; did you mean 'Finished'?",
        "did you mean 'Redact'?",
    ):
        assert words in log
