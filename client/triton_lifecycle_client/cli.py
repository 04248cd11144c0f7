"""The command ``lifecycle``. Each command imports what it needs when it runs, so that ``--help`` is quick."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import config_cli, events_cli, server_cli
from .terminal import ASK_CODES, UsageFault, err, out, print_json, reported, write

if TYPE_CHECKING:
    from collections.abc import Callable

    from .sync import Client
    from .types import Chunk, Completion, Drain, Options

app = typer.Typer(
    name="lifecycle",
    epilog="Begin with `lifecycle demo`, or `lifecycle serve` in one terminal and "
    '`lifecycle generate "The capital of France is"` in another.',
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:  # noqa: FBT001 - typer's form
    if asked:
        from triton_lifecycle import __version__  # noqa: PLC0415

        out.print(f"lifecycle {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def _all_commands(
    *,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Ask, watch and run language models behind Triton Inference Server."""


Prompt = Annotated[str, typer.Argument(help="The text to continue; `-` reads it from standard input.")]
RequestId = Annotated[str, typer.Argument(help="The caller's id of the request, or the server's own.")]
Url = Annotated[
    str | None,
    typer.Option(
        envvar="LIFECYCLE_URL",
        help="The server: `host:port`, or with `grpc://` or `http://` before it. "
        "Default: 127.0.0.1, port 8001 for gRPC, 8000 for HTTP.",
        show_default=False,
        show_envvar=True,
    ),
]
Grpc = Annotated[
    bool | None, typer.Option("--grpc/--http", help="How to speak to the server. Default: gRPC.", show_default=False)
]
Model = Annotated[str, typer.Option("--model", "-m", help="The model to ask.")]
MaxTokens = Annotated[int | None, typer.Option(help="Most tokens to make. Default: the server's (16).")]
Temperature = Annotated[float | None, typer.Option(help="0 always takes the likeliest token.")]
TopP = Annotated[float | None, typer.Option(help="Choose among the likeliest tokens that together reach this share.")]
TopK = Annotated[int | None, typer.Option(help="Choose among this many likeliest tokens.")]
Stop = Annotated[list[str] | None, typer.Option(help="End before this text; may be given several times.")]
Seed = Annotated[int | None, typer.Option(help="Makes a random choice repeatable.")]
Timeout = Annotated[float, typer.Option(help="Seconds for the whole request.", min=0.001)]
Priority = Annotated[int | None, typer.Option(help="Lower numbers go first.")]
Param = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=JSON",
        help="Any further sampling parameter of vLLM, such as `min_p=0.1` or `'stop_token_ids=[2]'`; several times.",
    ),
]
NOT_CARRIED = frozenset({"logprobs", "prompt_logprobs"})
"""Sampling parameters that add to an answer what the client library has no place for."""
AsJson = Annotated[bool, typer.Option("--json", help="Answer in JSON, errors too.")]


@app.command(
    epilog="""**Examples**

`lifecycle generate "The capital of France is"`

`lifecycle generate "Once upon a time" --max-tokens 200 --temperature 0.8 --seed 7`

`cat letter.txt | lifecycle generate - --no-stream --json`

`lifecycle generate "1, 2, 3," --http --url 127.0.0.1:8000 --param min_tokens=5`

"""
    + ASK_CODES
)
def generate(
    prompt: Prompt,
    *,
    stream: Annotated[
        bool | None,
        typer.Option("--stream/--no-stream", help="Show text as it comes. Default: on a terminal.", show_default=False),
    ] = None,
    url: Url = None,
    grpc: Grpc = None,
    model: Model = "smollm2",
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    stop: Stop = None,
    seed: Seed = None,
    timeout: Timeout = 300.0,
    priority: Priority = None,
    tenant: Annotated[str | None, typer.Option(help="On whose account the request runs.")] = None,
    request_id: Annotated[str | None, typer.Option("--id", help="Your name for the request.")] = None,
    partial: Annotated[
        bool, typer.Option("--partial", help="When time runs out, take the text that there is by then; not streamed.")
    ] = False,
    param: Param = None,
    as_json: AsJson = False,
) -> None:
    """Continue a text. Ctrl-C cancels the request on the server."""
    with reported(as_json=as_json):
        options: Options = {
            "sampling": sampling(
                param, max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, stop=stop, seed=seed
            ),
            "timeout": timeout,
        }
        for name in sorted(NOT_CARRIED & {name for name, value in options["sampling"].items() if value is not None}):
            err.print(f"note: {name} will not be shown, as this client does not carry it", style="dim", soft_wrap=True)
        if priority is not None:
            options["priority"] = priority
        if tenant is not None:
            options["tenant"] = tenant
        if request_id is not None:
            options["request_id"] = request_id
        if partial and stream:
            raise UsageFault("give --stream or --partial: a stream shows what is made in time anyway")
        if partial:
            options["parameters"] = {"partial": True}
        text = read_prompt(prompt)
        with connect(url, model, grpc=grpc) as client:
            if stream if stream is not None else sys.stdout.isatty() and not (as_json or partial):
                _stream(client, text, options, as_json=as_json)
            else:
                _whole(client, text, options, as_json=as_json)


@app.command(
    epilog="**Examples**\n\n`lifecycle chat --system 'You answer in one sentence.'`\n\n"
    "`printf 'I am Ada.\\nWho am I?\\n' | lifecycle chat`, which ends at the first answer that fails\n\n" + ASK_CODES
)
def chat(
    *,
    system: Annotated[str | None, typer.Option(help="What the model is told before the conversation.")] = None,
    url: Url = None,
    grpc: Grpc = None,
    model: Model = "smollm2",
    max_tokens: MaxTokens = 256,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    stop: Stop = None,
    seed: Seed = None,
    timeout: Timeout = 300.0,
    param: Param = None,
) -> None:
    """Talk with the model. Ctrl-C stops an answer; `/reset` forgets, `/exit` leaves."""
    from . import chat as talk  # noqa: PLC0415

    with reported():
        options: Options = {
            "sampling": sampling(
                param, max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, stop=stop, seed=seed
            ),
            "timeout": timeout,
        }
        with connect(url, model, grpc=grpc) as client:
            talk.run(client, talk.Conversation(system), options)


@app.command(epilog="**Example**\n\n`lifecycle status 7d5c… --json`\n\n" + ASK_CODES)
def status(
    request_id: RequestId, *, url: Url = None, grpc: Grpc = None, model: Model = "smollm2", as_json: AsJson = False
) -> None:
    """Show where a request is in its life, or how it ended and where its time went."""
    import msgspec  # noqa: PLC0415

    with reported(as_json=as_json), connect(url, model, grpc=grpc) as client:
        found = client.status(request_id)
        if as_json:
            print_json(msgspec.to_builtins(found))
            return
        from .demo import show_timing  # noqa: PLC0415

        out.print(f"{found.caller_id or found.id}: {found.status}", markup=False, soft_wrap=True)
        show_timing({found.status: found})


@app.command(epilog="**Examples**\n\n`lifecycle cancel 7d5c…`\n\n`lifecycle cancel --all -m smollm2`\n\n" + ASK_CODES)
def cancel(
    request_id: Annotated[
        str | None, typer.Argument(help="The caller's id of the request, or the server's own.")
    ] = None,
    *,
    every: Annotated[bool, typer.Option("--all", help="Cancel every live request of the model.")] = False,
    url: Url = None,
    grpc: Grpc = None,
    model: Model = "smollm2",
    as_json: AsJson = False,
) -> None:
    """Cancel a request that somebody else waits for, or all of them."""
    if (request_id is None) is not every:
        raise typer.BadParameter("give the id of one request, or --all", param_hint="REQUEST_ID")
    with reported(as_json=as_json), connect(url, model, grpc=grpc) as client:
        if request_id is None:
            count = client.cancel_all()
            print_json({"cancelled": count}) if as_json else out.print(f"{count} requests cancelled")
            return
        cancelled = client.cancel(request_id)
        if as_json:
            print_json({"id": request_id, "cancelled": cancelled})
        else:
            out.print(
                f"{request_id}: {'cancelled' if cancelled else 'had already ended'}", markup=False, soft_wrap=True
            )


@app.command(epilog="**Example**\n\n`lifecycle state -m smollm2 --json`\n\n" + ASK_CODES)
def state(*, url: Url = None, grpc: Grpc = None, model: Model = "smollm2", as_json: AsJson = False) -> None:
    """Show what the server is doing as a whole: live requests, engine, ends, limits, events, predictions."""
    import msgspec  # noqa: PLC0415

    with reported(as_json=as_json), connect(url, model, grpc=grpc) as client:
        found = msgspec.to_builtins(client.state())
        if as_json:
            print_json(found)
            return
        from rich.table import Table  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415

        table = Table("", "", box=None, show_header=False, pad_edge=False)
        for name, value in found.items():
            for label, shown in _flat(name, value):
                table.add_row(label, Text(shown, overflow="fold"))
        out.print(table)


def _flat(name: str, value: Any) -> list[tuple[str, str]]:  # noqa: ANN401 - JSON
    """Return the lines of a part of the state: names joined by points, nothing for what is empty."""
    if isinstance(value, dict):
        return [line for key, inner in value.items() for line in _flat(f"{name}.{key}", inner)]
    if value is None or value == []:
        return []
    return [(name, f"{value:,.3g}" if isinstance(value, float) else str(value))]


@app.command(epilog="**Example**, as a probe\n\n`lifecycle ready --url 127.0.0.1:8001 -m smollm2`\n\n" + ASK_CODES)
def ready(*, url: Url = None, grpc: Grpc = None, model: Model = "smollm2", as_json: AsJson = False) -> None:
    """Tell whether the model would serve a request now. Exit code 0 only then: good as a readiness probe."""
    with reported(as_json=as_json), connect(url, model, grpc=grpc) as client:
        client.check_ready()
        if as_json:
            print_json({"ready": True})
        else:
            out.print(f"{model} is ready", markup=False)


@app.command(
    epilog="**Examples**\n\n`lifecycle drain --url 127.0.0.1:8001`, before a server is stopped\n\n"
    "`lifecycle drain --resume`\n\n" + ASK_CODES
)
def drain(
    *,
    resume: Annotated[bool, typer.Option("--resume", help="Have a model that drains take requests again.")] = False,
    url: Url = None,
    grpc: Grpc = None,
    model: Model = "smollm2",
    as_json: AsJson = False,
) -> None:
    """Refuse new requests and wait until none is left; those that outlast the drain's limit are ended."""
    import msgspec  # noqa: PLC0415

    with reported(as_json=as_json), connect(url, model, grpc=grpc) as client:
        found = client.resume() if resume else client.drained(_draining())
        if as_json:
            print_json(msgspec.to_builtins(found))
        else:
            out.print(f"{model} takes requests" if resume else f"{model} is drained: no request is live", markup=False)


@app.command(epilog="**Example**\n\n`lifecycle unload -m smollm2`\n\n" + ASK_CODES)
def unload(*, url: Url = None, grpc: Grpc = None, model: Model = "smollm2", as_json: AsJson = False) -> None:
    """Drain the model and have Triton unload it. Triton alone waits for running requests as long as they take."""
    with reported(as_json=as_json), connect(url, model, grpc=grpc) as client:
        took = client.unload(_draining())
        if as_json:
            print_json({"model": model, "unloaded_in_s": round(took, 3)})
        else:
            out.print(f"{model} is unloaded after {took:.1f} s", markup=False)


def _draining() -> Callable[[Drain], None]:
    """Return what tells of a drain once its numbers have changed."""
    told = -1

    def tell(found: Drain) -> None:
        nonlocal told
        if found.live != told:
            told = found.live
            err.print(f"draining: {told} requests are live, at most {found.limit:g} s", style="dim")

    return tell


server_cli.register(app)
app.add_typer(config_cli.app, name="config")
events_cli.register(app)


def sampling(extra: list[str] | None, **named: Any) -> dict[str, Any]:  # noqa: ANN401 - values of any JSON type
    """Return the sampling parameters from the options and from ``--param``.

    Raises:
        UsageFault: a ``--param`` is not KEY=JSON.

    """
    values = {name: value for name, value in named.items() if value is not None and value != []}
    for text in extra or ():
        name, _, value = text.partition("=")
        try:
            values[name] = json.loads(value)
        except ValueError:
            name = ""
        if not name.isidentifier():
            raise UsageFault(
                f"--param wants KEY=JSON, such as min_p=0.1, 'stop_token_ids=[2]' or 'key=\"text\"', got {text!r}"
            )
    return values


def read_prompt(given: str) -> str:
    """Return the prompt, from standard input if it is ``-``.

    Raises:
        UsageFault: it is empty, or its bytes are not UTF-8.

    """
    try:
        text = sys.stdin.buffer.read().decode() if given == "-" else given
    except UnicodeDecodeError as error:
        raise UsageFault(f"standard input is not UTF-8 text (byte {error.start}); convert it first") from None
    if not text:
        raise UsageFault("the prompt is empty; give some text to continue")
    return text


def connect(url: str | None, model: str, *, grpc: bool | None) -> Client:
    """Return a client for the options of a command.

    Raises:
        UsageFault: address and protocol do not fit each other.

    """
    from triton_lifecycle.errors import InvalidInput  # noqa: PLC0415

    from .sync import Client  # noqa: PLC0415

    try:
        return Client(url, model=model, protocol=None if grpc is None else "grpc" if grpc else "http")
    except InvalidInput as error:
        raise UsageFault(error.message) from None


def completion_json(completion: Completion) -> dict[str, Any]:
    """Return a completion as the object that ``--json`` prints."""
    import msgspec  # noqa: PLC0415

    fields: dict[str, Any] = msgspec.to_builtins(completion)
    return {"text": completion.text, "finish_reason": completion.finish_reason} | fields


def chunk_json(chunk: Chunk) -> dict[str, Any]:
    """Return a chunk as one of the lines that ``--json --stream`` prints."""
    line: dict[str, Any] = {"text": chunk.text, "output_tokens": chunk.output_tokens}
    if len(chunk.texts) > 1:
        line["texts"] = list(chunk.texts)
    if any(chunk.finish_reasons):
        line["finish_reason"] = chunk.finish_reason
    return line


def _whole(client: Client, prompt: str, options: Options, *, as_json: bool) -> Completion:
    from triton_lifecycle.errors import DeadlineExceeded  # noqa: PLC0415

    try:
        completion = client.generate(prompt, **options)
    except DeadlineExceeded:
        if not as_json:
            err.print("hint: --partial takes what is made in time, --stream shows it as it comes", style="dim")
        raise
    if as_json:
        print_json(completion_json(completion))
    elif len(completion.texts) == 1:
        write(completion.text + "\n")
    else:
        for number, text in enumerate(completion.texts, start=1):
            out.print(f"--- {number} of {len(completion.texts)}", style="dim")
            write(text + "\n")
    return completion


def _stream(client: Client, prompt: str, options: Options, *, as_json: bool) -> None:
    several = options["sampling"].get("n")
    if not as_json and isinstance(several, int) and several > 1:
        # Several texts that grow at the same time cannot be read: each is shown when it is whole.
        _footer(_whole(client, prompt, options, as_json=False))
        return
    with client.stream(prompt, **options) as stream:
        try:
            for chunk in stream:
                if as_json:
                    print_json(chunk_json(chunk))
                else:
                    write(chunk.text)
        finally:
            if not as_json and stream.text:
                write("\n")
        completion = stream.completion
    if as_json:
        print_json({"done": completion_json(completion)})
    else:
        _footer(completion)


def _footer(completion: Completion) -> None:
    if err.is_terminal:
        # The id comes first, so that no line end of the terminal falls into it.
        err.print(
            f"id {completion.request_id}: {completion.output_tokens} tokens, {completion.finish_reason}; "
            f"first text after {completion.first_chunk_s * 1e3:.0f} ms, all after {completion.total_s * 1e3:.0f} ms",
            style="dim",
            markup=False,
        )


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()
