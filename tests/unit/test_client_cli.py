"""The command line: output, exit codes and messages, against fake front ends and a fake server."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from tests.fakes.front_ends import MODEL, Ask, Fail, FrontEnds, Say, front_ends
from triton_lifecycle import __version__, launcher
from triton_lifecycle.errors import BY_SLUG, LifecycleError, Overloaded, PromptTooLong, RequestError
from triton_lifecycle.launcher import DiskFull, LauncherError, foreground, ports
from triton_lifecycle_client import Client, chat, cli, demo, server_cli
from triton_lifecycle_client.cli import app
from triton_lifecycle_client.errors import ServerUnreachable
from triton_lifecycle_client.types import Completion

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from click.testing import Result

STATUS = {
    "id": "u", "caller_id": "r", "model": MODEL, "status": "finished", "stage": "respond", "slug": None,
    "times_ms": {"received": 0.0, "admitted": 0.5, "first_token": 12.3, "finished": 45.6}, "received_at": 1.0,
    "prompt_tokens": 5, "cached_tokens": 4, "output_tokens": 3, "attempts": 1, "finish_reason": "length",
}  # fmt: skip

STATE = {
    "live": 2, "draining": False, "engine": {"status": "ready", "running": 2, "kv_usage": 0.25},
    "counts": {"received": 12, "completed": 10}, "prediction": None, "handlers": {"predictor": {"handled": 70}},
}  # fmt: skip


def answer(ask: Ask) -> Iterator[Say | Fail]:
    """Answer as the backend would."""
    control = ask.parameters.get("control")
    if control == "status":
        yield Say(json.dumps(STATUS))
    elif control == "cancel":
        yield Say('{"id": "u", "cancelled": true}')
    elif control == "state":
        yield Say(json.dumps(STATE))
    elif control in {"drain", "resume"}:
        yield Say(json.dumps({"draining": control == "drain", "live": 0, "limit": 20.0}))
    elif control == "cancel_all":
        yield Say('{"cancelled": 2}')
    elif ask.prompt == "long":
        yield Fail("prompt_too_long: the prompt has 9 tokens, the model takes 8")
    elif ask.prompt == "mid":
        yield Say("Par")
        yield Fail("stall_timeout: no token for 1 s")
    elif ask.inputs["stream"]:
        yield Say("Par")
        yield Say("is 😀", "length")
    else:
        yield Say("Paris 😀", "length", 2)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[FrontEnds]:
    """Run the fake front ends."""
    monkeypatch.delenv("LIFECYCLE_URL", raising=False)
    with front_ends(answer) as running:
        yield running


@pytest.fixture
def run(fakes: FrontEnds) -> Callable[..., Result]:
    """Return a function that runs a command against the fakes."""

    def invoke(*arguments: str, stdin: bytes | None = None, url: str | None = None) -> Result:
        return CliRunner().invoke(
            app, [*arguments, "--model", MODEL, "--url", url or fakes.grpc], input=stdin, env={"COLUMNS": "200"}
        )

    return invoke


def test_generate_prints_the_text(run: Callable[..., Result]):
    """Without a terminal the whole text comes at once; with --stream it is the same text."""
    whole = run("generate", "hi")
    assert (whole.exit_code, whole.stdout) == (0, "Paris 😀\n")
    assert run("generate", "hi", "--stream").stdout == "Paris 😀\n"


def test_generate_over_http_and_from_the_environment(fakes: FrontEnds, monkeypatch: pytest.MonkeyPatch):
    """LIFECYCLE_URL names server and protocol."""
    monkeypatch.setenv("LIFECYCLE_URL", f"http://{fakes.http}")
    assert CliRunner().invoke(app, ["generate", "hi", "-m", MODEL]).stdout == "Paris 😀\n"


def test_generate_in_json(run: Callable[..., Result]):
    """One document, or a line for each chunk and one for the end."""
    whole = json.loads(run("generate", "hi", "--json").stdout)
    assert (whole["text"], whole["finish_reason"], whole["output_tokens"], whole["prompt_tokens"]) == (
        "Paris 😀",
        "length",
        2,
        3,
    )
    lines = [json.loads(line) for line in run("generate", "hi", "--json", "--stream").stdout.splitlines()]
    assert [line.get("text") for line in lines] == ["Par", "is 😀", None]
    assert lines[2]["done"]["text"] == "Paris 😀"


class SayTwo(Say):
    """A response of a request with n=2."""

    def outputs(self) -> dict[str, Any]:
        """Return the output tensors by name, two elements each."""
        return {"text_output": ["Paris", "Lyon"], "finish_reason": ["stop", "length"], "num_output_tokens": [1, 2]}


@pytest.mark.parametrize("stream", ["--stream", "--no-stream"])
def test_every_sequence_is_shown(run: Callable[..., Result], fakes: FrontEnds, stream: str):
    """With n=2 both texts are printed, each under a heading; streaming waits for them; JSON holds both."""
    fakes.model = lambda ask: iter([SayTwo()])
    two = ["generate", "hi", "--param", "n=2", stream]
    assert run(*two, url=f"http://{fakes.http}").stdout == "--- 1 of 2\nParis\n--- 2 of 2\nLyon\n"
    last = json.loads(run(*two, "--json", url=f"http://{fakes.http}").stdout.splitlines()[-1])
    assert last.get("done", last)["texts"] == ["Paris", "Lyon"]


def test_what_cannot_be_shown_is_said(run: Callable[..., Result]):
    """Logprobs are asked for, but have no place in the client's answer: a note on stderr, the output stays clean."""
    result = run("generate", "hi", "--json", "--param", "logprobs=2")
    assert json.loads(result.stdout)["text"] == "Paris 😀"
    assert "logprobs will not be shown" in result.stderr
    assert run("generate", "hi", "--param", "n=1", "--param", "logprobs=null").stderr == ""


def test_options_reach_the_model(run: Callable[..., Result], fakes: FrontEnds):
    """Sampling options, --param and the request's own options arrive as what they are."""
    options = {"--max-tokens": "3", "--temperature": "0.5", "--seed": "7", "--priority": "2", "--timeout": "2"}
    several = ["--stop", "a", "--stop", "b", "--param", "min_p=0.1", "--param", "x=[1]"]
    assert run("generate", "hi", "--id", "me", *sum(options.items(), ()), *several).exit_code == 0
    (ask,) = fakes.asked
    assert json.loads(ask.inputs["sampling_parameters"]) == {
        "max_tokens": 3, "temperature": 0.5, "stop": ["a", "b"], "seed": 7, "min_p": 0.1, "x": [1],
    }  # fmt: skip
    assert (ask.id, ask.parameters["request_priority"], ask.parameters["timeout"]) == ("me", 2, 2_000_000)


def test_a_prompt_from_standard_input(run: Callable[..., Result], fakes: FrontEnds):
    """`-` reads it, line ends and all."""
    assert run("generate", "-", stdin="zwei\nZeilen ü\n".encode()).exit_code == 0
    assert fakes.asked[0].prompt == "zwei\nZeilen ü\n"


@pytest.mark.parametrize(("arguments", "stdin", "said"), [
    (["generate", ""], None, "the prompt is empty"),
    (["generate", "-"], b"", "the prompt is empty"),
    (["generate", "-"], b"\xff", "not UTF-8"),
    (["generate", "hi", "--param", "min_p"], None, "KEY=JSON"),
    (["generate", "hi", "--param", "stop=x"], None, "KEY=JSON"),
    (["generate", "hi", "--param", "=1"], None, "KEY=JSON"),
    (["generate", "hi", "--timeout", "0"], None, "--timeout"),
    (["generate", "hi", "--bogus"], None, "No such option"),
    (["generate"], None, "Missing argument"),
    (["chat", "--bogus"], None, "No such option"),
])  # fmt: skip
def test_wrong_usage(run: Callable[..., Result], fakes: FrontEnds, arguments: list[str], stdin: bytes, said: str):
    """Exit code 2, a message that says what is wanted, and nothing is sent."""
    result = run(*arguments, stdin=stdin)
    assert result.exit_code == 2
    assert said in result.stderr
    assert not fakes.asked


@pytest.mark.parametrize("url", ["nonsense", "ftp://h:1"])
def test_a_wrong_address(run: Callable[..., Result], url: str):
    """A malformed address is wrong usage too."""
    assert run("generate", "hi", url=url).exit_code == 2


def test_a_failed_request(run: Callable[..., Result]):
    """`slug: message` on stderr, and with --json an object on stdout."""
    result = run("generate", "long")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "prompt_too_long: the prompt has 9 tokens, the model takes 8\n"
    assert json.loads(run("generate", "long", "--json").stdout) == {
        "error": {
            "slug": "prompt_too_long",
            "message": "the prompt has 9 tokens, the model takes 8",
            "retryable": False,
            "retry_after": None,
        }
    }


def test_a_failure_after_some_text(run: Callable[..., Result]):
    """What had come stays on the screen, in a line of its own."""
    result = run("generate", "mid", "--stream")
    assert (result.exit_code, result.stdout, result.stderr) == (1, "Par\n", "stall_timeout: no token for 1 s\n")


def test_no_server_and_the_wrong_port(run: Callable[..., Result], fakes: FrontEnds):
    """Exit code 3, and what to do."""
    gone = run("generate", "hi", url="127.0.0.1:1")
    assert gone.exit_code == 3
    assert "server_unreachable: nothing answers at grpc://127.0.0.1:1 (connection refused)" in gone.stderr
    for arguments in (["--url", fakes.http], ["--http"]):
        wrong = run("generate", "hi", *arguments, url=fakes.http if arguments[0] == "--url" else None)
        assert wrong.exit_code == 3
        assert "wrong_port: " in wrong.stderr


def test_an_unknown_model(fakes: FrontEnds):
    """The caller's fault, naming those there are, in every command."""
    for arguments in (["generate", "hi"], ["chat"], ["status", "r"], ["cancel", "r"]):
        result = CliRunner().invoke(app, [*arguments, "-m", "nobody", "--url", fakes.grpc], input="hi\n")
        assert result.exit_code == 2
        assert "model_not_found" in result.stderr
        assert "it has: m" in result.stderr


@pytest.mark.parametrize(
    "command", [["generate", "hi"], ["generate", "hi", "--json"], ["status", "r"], ["cancel", "r"]]
)
@pytest.mark.parametrize("error", [*BY_SLUG.values()], ids=lambda error: error.slug)
def test_every_error_has_its_exit_code(
    run: Callable[..., Result], fakes: FrontEnds, error: type[LifecycleError], command: list[str]
):
    """2 for what is the caller's fault, 3 for a server that cannot take it now, 1 for all else, in every command."""
    fakes.model = lambda ask: iter([Fail(error("x").wire())])
    kinds = {RequestError: 2, Overloaded: 3, ServerUnreachable: 3}
    expected = next((code for kind, code in kinds.items() if issubclass(error, kind)), 1)
    options = ["--timeout", "0.3"] if command[0] == "generate" else []  # too short to send a retryable one again
    assert run(*command, *options).exit_code == expected


@pytest.mark.parametrize("stdin", [b"hi\n", b"fine\nhi\nnever\n", b"/what\nnever\n", b"\xff\n"])
def test_a_piped_chat_ends_with_its_first_failure(run: Callable[..., Result], fakes: FrontEnds, stdin: bytes):
    """A script sees by the exit code that an answer is missing, and later questions are not asked."""
    fakes.model = lambda ask: iter([Fail("invalid_input: x")]) if told(ask).endswith("u:hi") else answer(ask)
    result = run("chat", stdin=stdin)
    assert result.exit_code == 2
    assert result.stderr.startswith("invalid_input: ")
    assert not any("never" in told(ask) for ask in fakes.asked)
    fine = run("chat", stdin=b"one\ntwo\n")
    assert (fine.exit_code, fine.stdout) == (0, "Paris 😀\nParis 😀\n")
    assert run("chat", stdin=b"one\n", url="127.0.0.1:1").exit_code == 3


def test_status_and_cancel(run: Callable[..., Result]):
    """Status shows when each point was reached; both speak JSON."""
    shown = run("status", "r").stdout
    assert "r: finished" in shown
    assert "12.3" in shown
    assert json.loads(run("status", "r", "--json").stdout)["times_ms"]["finished"] == 45.6
    assert "cancelled" in run("cancel", "r").stdout
    assert json.loads(run("cancel", "r", "--json").stdout) == {"id": "r", "cancelled": True}
    assert "2 requests cancelled" in run("cancel", "--all").stdout
    assert json.loads(run("cancel", "--all", "--json").stdout) == {"cancelled": 2}
    assert [run("cancel").exit_code, run("cancel", "r", "--all").exit_code] == [2, 2]


def test_state(run: Callable[..., Result]):
    """Every figure has a line with its place; what is empty has none."""
    shown = dict(line.split() for line in run("state").stdout.splitlines())
    assert shown["live"] == "2"
    assert shown["engine.kv_usage"] == "0.25"
    assert shown["counts.received"] == "12"
    assert shown["handlers.predictor.handled"] == "70"
    assert "prediction" not in shown
    assert json.loads(run("state", "--json").stdout)["engine"]["status"] == "ready"


def test_time_that_ran_out_says_how_to_keep_what_was_made(run: Callable[..., Result], fakes: FrontEnds):
    """The error is followed by the ways to see the text; --partial asks the server for it, and needs no hint."""

    def late(ask: Ask) -> Iterator[Say | Fail]:
        yield Say("Par", "timeout") if ask.parameters.get("partial") else Fail("total_timeout: 1 s passed; 2 tokens")

    fakes.model = late
    result = run("generate", "hi")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "--partial" in result.stderr
    assert "--partial" not in run("generate", "hi", "--json").stderr
    kept = run("generate", "hi", "--partial")
    assert (kept.exit_code, kept.stdout, kept.stderr) == (0, "Par\n", "")
    assert run("generate", "hi", "--partial", "--stream").exit_code == 2


def test_drain_and_unload(run: Callable[..., Result]):
    """A model is drained, resumed and unloaded by command, each with a word and a document."""
    assert run("drain").stdout == f"{MODEL} is drained: no request is live\n"
    assert json.loads(run("drain", "--json").stdout) == {"draining": True, "live": 0, "limit": 20.0}
    assert run("drain", "--resume").stdout == f"{MODEL} takes requests\n"
    done = run("unload", "--json")
    assert (done.exit_code, json.loads(done.stdout)["model"]) == (0, MODEL)


ASKING = ["generate", "chat", "status", "cancel", "state", "drain", "unload"]
COMMANDS = [*ASKING, "serve", "prepare", "doctor", "demo", "bench"]


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)])
def test_help_teaches(command: list[str]):
    """Every command explains itself."""
    result = CliRunner().invoke(app, [*command, "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.stdout
    assert not command or "Exit codes:" in result.stdout
    if command and command[0] in {*ASKING, "serve"}:
        assert "Example" in result.stdout


def test_help_loads_no_heavy_library():
    """`--help` must not wait for gRPC, numpy, aiohttp or transformers."""
    code = "import sys, triton_lifecycle_client.cli; print([m for m in sys.argv[1:] if m in sys.modules])"
    heavy = ["grpc", "numpy", "aiohttp", "tritonclient", "transformers", "psutil"]
    result = subprocess.run([sys.executable, "-c", code, *heavy], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_interrupt_cancels_and_exits_130(fakes: FrontEnds):
    """Ctrl-C during an answer cancels it on the server."""

    def slow(ask: Ask) -> Iterator[Say]:
        yield Say("a")
        ask.left.wait(10)

    fakes.model = slow
    command = [sys.executable, "-m", "triton_lifecycle_client", "generate", "hi", "--stream", "-m", MODEL]
    with subprocess.Popen(
        [*command, "--url", fakes.grpc],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A shell that starts the tests in the background has them, and so this command, ignore SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - nothing else runs in it
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read(1) == b"a"
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=10)
    assert process.returncode == 130
    assert b"Traceback" not in told
    assert fakes.asked[0].left.wait(30)


# Plays Ctrl-C at the n-th import and, should it have no effect, shows a traceback.
INTERRUPTED_IMPORT = """
import builtins, os, runpy, signal, sys
left = int(sys.argv.pop(1))
imports = builtins.__import__
def count(*arguments, **named):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGINT)
    return imports(*arguments, **named)
import triton_lifecycle_client.__main__ as entry
builtins.__import__ = count
sys.argv[0] = "lifecycle"
entry.main()
"""


@pytest.mark.parametrize("number", [1, 2, 20, 200, 600])
def test_ctrl_c_during_the_imports_exits_130(number: int):
    """However early it comes, there is no traceback and the exit code is that of an interruption."""
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_IMPORT, str(number), "generate", "hi", "--url", "127.0.0.1:1"],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert done.returncode == 130
    assert "Traceback" not in done.stderr


PRINTED = """
import sys
from types import SimpleNamespace as Fields
from triton_lifecycle.launcher import doctor
from triton_lifecycle_client import server_cli, terminal
from triton_lifecycle_client.demo import show_timing
from triton_lifecycle_client.types import Status
long = "/a/long path" * 20
names = ["grpc_url", "http_url", "metrics_url", "log_path"]
server_cli._announce(Fields(models=["m"], **{name: long for name in names}))
doctor.run_checks = lambda: [doctor.Check("a", "ok", long, long)]
doctor.main()
show_timing({"finished": Status(id="u", caller_id="r", model="m", status="", stage="", received_at=1)})
terminal.out.print(long)
terminal.err.print(long)
"""


def test_piped_output_is_never_wrapped():
    """Lines, tables and errors that a program reads hold long paths whole, whatever the terminal's width."""
    done = subprocess.run(
        [sys.executable, "-c", PRINTED],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"COLUMNS": "40"},
    )
    long = "/a/long path" * 20
    lines = done.stdout.splitlines()
    assert sum(line.count(long) for line in lines) == 8
    assert done.stderr == f"{long}\n"
    assert "where the time went (ms since received)" in lines
    assert max(map(len, lines)) < 1000  # wide, not padded


@pytest.mark.parametrize("columns", [40, 60, 80])
def test_a_terminal_does_not_break_the_id(monkeypatch: pytest.MonkeyPatch, columns: int):
    """The footer's id stands in one piece in the first line, to be copied."""
    shown = Console(force_terminal=True, width=columns, file=io.StringIO(), highlight=False, color_system=None)
    monkeypatch.setattr(cli, "err", shown)
    cli._footer(Completion("f" * 32, "m", ("x",), ("stop",), 1, 10, 0.5, 1.5, 1))
    assert isinstance(shown.file, io.StringIO)
    assert shown.file.getvalue().startswith("id " + "f" * 32)


def test_an_ignored_ctrl_c_stays_ignored():
    """A command in a shell's background, or under nohup, is not ended by the terminal's Ctrl-C."""
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_IMPORT, "20", "--help"],
        capture_output=True,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    assert done.returncode == 0


class Lines:
    """Plays the user of a chat: each read gives the next line, or raises it."""

    def __init__(self, *lines: str | type[BaseException]) -> None:
        self._lines = iter(lines)

    def __call__(self, _: str) -> str:
        """Return the next line."""
        line = next(self._lines, EOFError)
        if isinstance(line, str):
            return line
        raise line


def told(ask: Ask) -> str:
    """Write the conversation of a request in one line."""
    messages = json.loads(ask.inputs["sampling_parameters"])["messages"]
    return " | ".join(f"{turn['role'][0]}:{turn['content']}" for turn in messages)


def test_chat_remembers_and_forgets(fakes: FrontEnds, capsys: pytest.CaptureFixture[str]):
    """Each request holds the turns before it; /reset begins anew; neither Ctrl-C nor an unknown command leaves."""
    with Client(fakes.grpc, model=MODEL) as client:
        user = Lines("one", KeyboardInterrupt, "two", "/reset", "", "/what", "three", "/exit", "never")
        chat.run(client, chat.Conversation("be brief"), {}, read=user, interactive=True)
    assert [told(ask) for ask in fakes.asked] == [
        "s:be brief | u:one",
        "s:be brief | u:one | a:Paris 😀 | u:two",
        "s:be brief | u:three",
    ]
    shown = capsys.readouterr()
    assert shown.out.replace("\n\n", "\n") == "Paris 😀\n" * 3
    assert "unknown command /what" in shown.err


def test_chat_goes_on_after_a_failure(fakes: FrontEnds, capsys: pytest.CaptureFixture[str]):
    """A question that failed is taken back; the error and a hint are shown."""
    refuse = iter([PromptTooLong("the prompt has 9 tokens, the model takes 8").wire()])
    fakes.model = lambda ask: iter([Fail(text)]) if (text := next(refuse, None)) else answer(ask)
    with Client(fakes.grpc, model=MODEL) as client:
        chat.run(client, chat.Conversation(), {}, read=Lines("one", "two"), interactive=True)
    assert told(fakes.asked[1]) == "u:two"
    assert "/reset" in capsys.readouterr().err


def test_chat_ctrl_c_stops_the_answer_only(fakes: FrontEnds):
    """The answer is cancelled on the server, what had come is kept, and the chat goes on."""

    def interrupting(ask: Ask) -> Iterator[Say | Fail]:
        if "a:" in told(ask):
            yield from answer(ask)
            return
        yield Say("half")
        os.kill(os.getpid(), signal.SIGINT)
        ask.left.wait(5)

    fakes.model = interrupting
    with Client(fakes.grpc, model=MODEL) as client:
        chat.run(client, chat.Conversation(), {}, read=Lines("one", "two"), interactive=True)
    assert fakes.asked[0].left.wait(30)
    assert told(fakes.asked[1]) in {"u:one | a:half | u:two", "u:two"}


def test_ports_that_are_given_are_kept_and_others_are_free():
    """A usual port that is in use is replaced by a free one; one that was asked for is not."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        chosen = server_cli.choose_ports("127.0.0.1", number, None, None)
    assert chosen.http == number
    chosen.__class__(chosen.grpc, chosen.metrics, number).check("127.0.0.1")


def test_a_usual_port_that_is_taken_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Who holds it, and which one is used instead: clients that assume the usual one would ask another server."""
    usual = ports.Ports.free()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        monkeypatch.setattr(ports.Ports, "__init__", _with_defaults(usual.http, number, usual.metrics))
        chosen = server_cli.choose_ports("127.0.0.1", None, None, None)
    assert (chosen.http, chosen.metrics) == (usual.http, usual.metrics)
    told = capsys.readouterr().err
    assert re.fullmatch(rf"port {number} is taken by .* \(pid {os.getpid()}\); using {chosen.grpc}\n", told)


def _with_defaults(*usual: int) -> Callable[..., None]:
    def init(self: ports.Ports, *given: int) -> None:
        for name, value in zip(("http", "grpc", "metrics"), given or usual, strict=True):
            object.__setattr__(self, name, value)

    return init


class FakeServer:
    """Stands where TritonServer stands, with the fake front ends behind it."""

    shm_prefix = "tlc_none_"
    log_path = Path("server.log")
    leftovers: tuple[str, ...] = ()

    def __init__(self, fakes: FrontEnds, code: int = 0, fail: LauncherError | None = None) -> None:
        self.grpc_url, self.http_url, self._code, self._fail = fakes.grpc, fakes.http, code, fail
        self.stopped = False

    def start(self) -> None:
        """Start, or fail as told."""
        if self._fail:
            raise self._fail

    def wait_ready(self, timeout: float = 0, on_progress: Callable[[str], None] = print) -> None:
        """Be ready at once."""
        on_progress("loading m")

    def stop(self) -> int:
        """Stop with the exit code that was asked for."""
        assert not self._fail, "never started"
        self.stopped = True
        return self._code

    def processes(self) -> list[Any]:
        """Leave nothing."""
        return []


@pytest.mark.parametrize(("code", "exit_code", "said"), [(0, 0, "no process and no shared"), (1, 1, "exit code 1")])
def test_demo(fakes: FrontEnds, monkeypatch: pytest.MonkeyPatch, code: int, exit_code: int, said: str):
    """Both answers, one table, and the truth about what is left; success only if all is good."""
    server = FakeServer(fakes, code)
    monkeypatch.setattr(demo, "TritonServer", lambda *_, **__: server)
    result = CliRunner().invoke(app, ["demo", "-m", MODEL, "--prompt", "hi "], env={"COLUMNS": "200"})
    assert result.exit_code == exit_code
    assert result.stdout.count("hi Paris 😀\n") == 2
    assert "first token" in result.stdout
    assert said in result.stdout
    assert server.stopped


def test_demo_that_cannot_start(fakes: FrontEnds, monkeypatch: pytest.MonkeyPatch):
    """A fault of the set-up is told in its own words, with exit code 1."""
    fault = DiskFull("the model", Path("/data"), need=300_000_000, free=1_000_000)
    monkeypatch.setattr(demo, "TritonServer", lambda *_, **__: FakeServer(fakes, fail=fault))
    result = CliRunner().invoke(app, ["demo", "-m", MODEL])
    assert result.exit_code == 1
    assert "300 MB" in result.stderr
    assert "Traceback" not in result.stderr


def test_serve_with_a_taken_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The port and what to do are named before anything is started."""
    (tmp_path / "m").mkdir()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        monkeypatch.setattr(launcher, "project_root", lambda: tmp_path)
        result = CliRunner().invoke(app, ["serve", "--model-repository", str(tmp_path), "--http-port", port])
    assert result.exit_code == 1
    assert port in result.stderr


@pytest.mark.parametrize(("ended", "code"), [(0, 0), (1, 1), (2, 1), (3, 1), (-9, 1), (130, 130)])
def test_serve_has_no_other_exit_codes_than_its_help(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ended: int, code: int
):
    """However tritonserver ended, 2 and 3 keep their meaning."""
    monkeypatch.setattr(foreground.Foreground, "run", lambda *_, **__: ended)
    assert CliRunner().invoke(app, ["serve", "--model-repository", str(tmp_path)]).exit_code == code


def test_bench_outside_a_checkout(monkeypatch: pytest.MonkeyPatch):
    """Without the project's load folder, bench says so."""
    for name in ("load", "load.overhead.cli", "load.benchmark.cli"):  # another test may have imported them
        monkeypatch.setitem(sys.modules, name, None)
    for arguments in (["bench"], ["bench", "overhead"]):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 1
        assert "checkout" in result.stderr


def test_bench_has_two():
    """`lifecycle bench` measures requests under load, `lifecycle bench overhead` what the way costs."""
    assert "--scenario" in CliRunner().invoke(app, ["bench", "--help"]).stdout
    assert "--scenario" not in (shown := CliRunner().invoke(app, ["bench", "overhead", "--help"]).stdout)
    assert "--rounds" in shown


def test_typer_knows_all_commands():
    """Only commands that exist now are offered."""
    names = {command.name or getattr(command.callback, "__name__", "") for command in app.registered_commands}
    asks, servers = (
        {"generate", "chat", "status", "cancel", "ready", "state", "drain", "unload"},
        {"serve", "envoy", "prepare", "doctor", "demo", "bench"},
    )
    assert names == asks | servers | {"timeline", "replay"}
    assert isinstance(app, typer.Typer)


def test_the_version_is_shown():
    """`--version` answers in one line, without a command."""
    shown = CliRunner().invoke(app, ["--version"])
    assert (shown.exit_code, shown.stdout) == (0, f"lifecycle {__version__}\n")
