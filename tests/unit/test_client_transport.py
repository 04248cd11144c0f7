"""Client: both protocols against fake front ends on loopback: answers, errors, cancellation, deadlines, retries."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.front_ends import MODEL, Ask, Drop, End, Fail, FrontEnds, Model, Say, front_ends
from tests.waiting import eventually, until
from triton_lifecycle import errors as tree
from triton_lifecycle_client import (
    NO_RETRY,
    AsyncClient,
    Client,
    ModelNotFound,
    ProtocolError,
    RetryPolicy,
    ServerUnreachable,
    WrongPort,
)
from triton_lifecycle_client import client as client_module

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

STREAM = [Say("Pa"), Say("ris 😀"), Say("世", "length", 2)]


@pytest.fixture(params=["grpc", "http"])
def protocol(request: pytest.FixtureRequest) -> str:
    """Return each protocol in turn."""
    return str(request.param)


@pytest.fixture
def fakes() -> Iterator[FrontEnds]:
    """Run the fake front ends."""
    with front_ends() as running:
        yield running


def drive(fakes: FrontEnds, protocol: str, work: Callable[[AsyncClient], Awaitable[None]], **options: object) -> None:
    """Run a test's coroutine with a client."""

    async def main() -> None:
        async with AsyncClient(fakes.url(protocol), model=MODEL, protocol=protocol, **options) as client:  # type: ignore[arg-type]
            await asyncio.wait_for(work(client), 10)

    asyncio.run(main())


def says(*steps: Say | Fail | Drop | End) -> Model:
    """Return a model that says the same to everyone."""
    return lambda ask: iter(steps)


def waits(*first: Say) -> Model:
    """Return a model that says something and then works until the caller leaves, for 5 s at most."""

    def model(ask: Ask) -> Iterator[Say]:
        if "control" in ask.parameters:
            yield Say('{"id": "u", "cancelled": true}')
            return
        yield from first
        if not first:
            ask.left.wait(5)
            return
        for _ in range(250):
            if ask.left.wait(0.02):
                return
            yield Say("x")

    return model


def test_a_whole_answer(fakes: FrontEnds, protocol: str):
    """`generate` returns text, reason, counts and the id; the model sees all that was asked for."""
    fakes.model = says(Say("Paris", "stop", 4))

    async def work(client: AsyncClient) -> None:
        answer = await client.generate("hi", max_tokens=4, stop=["a"], sampling={"min_p": 0.5}, priority=-1, tenant="t")
        assert (answer.text, answer.finish_reason, answer.output_tokens, answer.prompt_tokens) == (
            "Paris",
            "stop",
            4,
            3,
        )
        assert answer.attempts == 1
        (ask,) = fakes.asked
        assert answer.request_id == ask.id
        assert json.loads(ask.inputs["sampling_parameters"]) == {"max_tokens": 4, "stop": ["a"], "min_p": 0.5}
        assert (ask.prompt, ask.inputs["stream"], ask.inputs["exclude_input_in_output"]) == ("hi", False, True)
        assert ask.parameters["tenant"] == "t"
        assert ask.parameters["timeout"] == 300_000_000
        assert ask.parameters["request_priority" if protocol == "grpc" else "priority"] == -1

    drive(fakes, protocol, work)


@pytest.mark.parametrize("end", [[], [End()]])
def test_a_stream(fakes: FrontEnds, protocol: str, end: list[End]):
    """Chunks arrive one by one, characters whole; the completion adds them up; an empty last response is no chunk."""
    fakes.model = says(*STREAM, *end)

    async def work(client: AsyncClient) -> None:
        stream = client.stream("hi", request_id="mine")
        assert [chunk.text async for chunk in stream] == ["Pa", "ris 😀", "世"]
        assert stream.completion.text == "Paris 😀世"
        assert stream.completion.output_tokens == 4
        assert stream.completion.finish_reason == "length"
        assert fakes.asked[0].id == "mine"
        assert fakes.asked[0].inputs["stream"]

    drive(fakes, protocol, work)


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("way", ["break", "error"])
def test_leaving_the_loop_cancels(fakes: FrontEnds, protocol: str, way: str, named: bool):  # noqa: FBT001
    """`break` or an error is enough for the server to notice, also while a name still holds the stream."""
    fakes.model = waits(Say("a"))

    async def work(client: AsyncClient) -> None:
        stream = client.stream("hi")
        with suppress(ZeroDivisionError):
            async for _ in stream if named else client.stream("hi"):
                if way == "break":
                    break
                raise ZeroDivisionError
        await eventually(fakes.asked[0].left.is_set)
        assert stream.request_id

    drive(fakes, protocol, work)


@pytest.mark.parametrize("cancelled", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_closing_the_client_cancels_what_is_under_way(
    fakes: FrontEnds,
    protocol: str,
    stream: bool,  # noqa: FBT001
    cancelled: bool,  # noqa: FBT001
):
    """Closed in the very moment in which a caller gives up, or under one who still waits: the server hears of it."""
    fakes.model = waits()

    async def main() -> None:
        client = AsyncClient(fakes.url(protocol), model=MODEL, protocol=protocol)  # type: ignore[arg-type]
        coming = anext(client.stream("hi", request_id="r")) if stream else client.generate("hi", request_id="r")
        task = asyncio.ensure_future(coming)
        await eventually(lambda: fakes.asked)
        if cancelled:
            task.cancel()
        await client.aclose()
        with pytest.raises(asyncio.CancelledError if cancelled else tree.Cancelled):
            await task
        await eventually(lambda: fakes.asked[0].left.is_set() if protocol == "grpc" else fakes.cancels == ["r"])

    asyncio.run(main())


def test_leaving_after_the_last_text_waits_for_the_end(fakes: FrontEnds):
    """Over gRPC a stream that the server is just ending is not cancelled: Triton 2.51 would lose track of it."""
    cancelled: list[bool] = []

    def model(ask: Ask) -> Iterator[Say | End]:
        yield Say("all", "stop")
        cancelled.append(ask.left.wait(0.3))
        yield End()

    fakes.model = model

    async def work(client: AsyncClient) -> None:
        stream = client.stream("p")
        assert (await anext(stream)).text == "all"
        await stream.aclose()
        assert cancelled == [False]

    drive(fakes, "grpc", work)


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_before_the_first_response_cancels(fakes: FrontEnds, protocol: str, stream: bool):  # noqa: FBT001
    """Triton does not see an HTTP caller leave before it has written something: the client says it in words."""
    fakes.model = waits()

    async def work(client: AsyncClient) -> None:
        coming = anext(client.stream("hi", request_id="r")) if stream else client.generate("hi", request_id="r")
        task = asyncio.ensure_future(coming)
        await eventually(lambda: fakes.asked)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await eventually(lambda: fakes.asked[0].left.is_set() if protocol == "grpc" else fakes.cancels == ["r"])

    drive(fakes, protocol, work)


def test_a_cancel_that_overtook_its_request_is_repeated(fakes: FrontEnds):
    """Over HTTP order and request take two connections: an order for an id not yet known is given once more."""
    answers = iter([Fail("unknown_request: no request 'r'"), Say('{"id": "u", "cancelled": true}')])
    fakes.model = lambda ask: iter([next(answers)]) if ask.parameters.get("control") else waits()(ask)

    async def work(client: AsyncClient) -> None:
        task = asyncio.create_task(client.generate("hi", request_id="r"))
        await eventually(lambda: fakes.asked)
        task.cancel()
        await eventually(lambda: fakes.cancels == ["r", "r"])

    drive(fakes, "http", work)


def test_an_error_in_the_middle(fakes: FrontEnds, protocol: str):
    """The text before it has arrived, its class is ours, and nothing is sent again."""
    fakes.model = says(Say("a"), Fail("stall_timeout: no token for 1 s"))

    async def work(client: AsyncClient) -> None:
        stream = client.stream("hi")
        with pytest.raises(tree.StallTimeout, match="no token for 1 s"):
            async for _ in stream:
                pass
        assert stream.text == "a"
        assert len(fakes.asked) == 1

    drive(fakes, protocol, work)


@pytest.mark.parametrize("stream", [True, False])
def test_a_refused_request_is_sent_again_after_the_hint(fakes: FrontEnds, protocol: str, stream: bool):  # noqa: FBT001
    """Refused twice with a hint, accepted the third time; the deadline that is sent shrinks."""
    refusals = iter([Fail("queue_full: 64 wait; retry after 0.1 s")] * 2)
    fakes.model = lambda ask: iter([next(refusals, Say("ok", "stop"))])

    async def work(client: AsyncClient) -> None:
        begin = time.monotonic()
        if stream:
            coming = client.stream("hi", timeout=5)
            assert [chunk.text async for chunk in coming] == ["ok"]
            assert coming.completion.attempts == 3
        else:
            assert (await client.generate("hi", timeout=5)).attempts == 3
        assert time.monotonic() - begin >= 0.2
        assert fakes.asked[0].parameters["timeout"] == 5_000_000
        assert fakes.asked[2].parameters["timeout"] <= 4_800_000

    drive(fakes, protocol, work)


def test_no_retry_past_the_deadline_or_the_limit(fakes: FrontEnds, protocol: str):
    """A hint that lies behind the deadline, or the last attempt, gives the server's own error at once."""
    fakes.model = says(Fail("queue_full: 64 wait; retry after 2.0 s"))

    async def work(client: AsyncClient) -> None:
        with pytest.raises(tree.QueueFull) as caught:
            await client.generate("hi", timeout=1.0)
        assert caught.value.retry_after == 2.0
        assert len(fakes.asked) == 1

    drive(fakes, protocol, work, retry=RetryPolicy(attempts=9))
    drive(fakes, protocol, _expect(tree.QueueFull), retry=NO_RETRY)


def test_a_wrong_request_is_not_sent_again(fakes: FrontEnds, protocol: str):
    """Bad input stays bad."""
    fakes.model = says(Fail("invalid_input: temperature must be at least 0, got -1"))
    drive(fakes, protocol, _expect(tree.InvalidInput))
    assert len(fakes.asked) == 1


@pytest.mark.parametrize("stream", [True, False])
def test_a_silent_server_does_not_hang_the_caller(
    fakes: FrontEnds,
    protocol: str,
    stream: bool,  # noqa: FBT001
    monkeypatch: pytest.MonkeyPatch,
):
    """Some time after its own deadline the client ends the wait by itself, and cancels."""
    monkeypatch.setattr(client_module, "_GRACE_S", 0.1)
    fakes.model = waits()

    async def work(client: AsyncClient) -> None:
        begin = time.monotonic()
        with pytest.raises(tree.TotalTimeout, match=r"within 0\.3 s"):
            await (anext(client.stream("hi", timeout=0.2)) if stream else client.generate("hi", timeout=0.2))
        assert time.monotonic() - begin < 10, "the server says nothing for ever"
        await eventually(lambda: fakes.asked[0].left.is_set() if protocol == "grpc" else fakes.cancels)

    drive(fakes, protocol, work)


def test_a_question_has_its_own_limit(protocol: str):
    """A question that is not answered ends after ``control_timeout``, whatever requests may take."""

    async def main(address: str) -> float:
        begin = time.monotonic()
        async with AsyncClient(address, protocol=protocol, timeout=60.0, control_timeout=0.3) as client:  # type: ignore[arg-type]
            with pytest.raises(tree.TotalTimeout, match=r"within 0\.3 s"):
                await client.state()
        return time.monotonic() - begin

    with socket.create_server(("127.0.0.1", 0)) as deaf:
        assert asyncio.run(main(f"127.0.0.1:{deaf.getsockname()[1]}")) < 5


def test_a_stream_that_stops_short_is_no_success(fakes: FrontEnds, protocol: str):
    """Without a finish reason the answer may be cut: that is an error, not an end."""
    fakes.model = says(Say("a"), Say("b"))
    drive(fakes, protocol, _expect(ProtocolError, "2 tokens"))


def test_a_broken_connection(fakes: FrontEnds, protocol: str):
    """After some text it is an error; before any, the request is sent again."""
    fakes.model = says(Say("a"), Drop())
    drive(fakes, protocol, _expect(ServerUnreachable, "stopping or has died"))
    assert len(fakes.prompts) == 1
    steps: Iterator[Drop | Say] = iter([Drop()])
    fakes.model = lambda ask: iter([next(steps, Say("ok", "stop"))])

    async def work(client: AsyncClient) -> None:
        stream = client.stream("hi")
        assert [chunk.text async for chunk in stream] == ["ok"]
        assert stream.completion.attempts == 2

    drive(fakes, protocol, work)


def test_an_unknown_model_is_named_with_those_there_are(fakes: FrontEnds, protocol: str):
    """The message lists the models that are ready."""

    async def work(client: AsyncClient) -> None:
        with pytest.raises(ModelNotFound, match=r"no model 'nobody' ready; it has: m$"):
            await client.generate("hi", model="nobody")

    drive(fakes, protocol, work)


def test_the_other_protocols_port(fakes: FrontEnds, protocol: str):
    """HTTP at the gRPC port, or the reverse, is called by its name and is not tried again."""
    other = fakes.http if protocol == "grpc" else fakes.grpc

    async def main() -> None:
        async with AsyncClient(other, model=MODEL, protocol=protocol) as client:  # type: ignore[arg-type]
            with pytest.raises(WrongPort, match="does not speak"):
                await client.generate("hi")
            assert not await client.is_ready()
            with pytest.raises(WrongPort):
                await client.wait_ready(5)

    asyncio.run(main())


def test_nothing_listens(fakes: FrontEnds, protocol: str):
    """A server that is not running is named, and what to do about it; waiting for it has an end."""

    async def main() -> None:
        async with AsyncClient("127.0.0.1:1", protocol=protocol, retry=NO_RETRY) as client:  # type: ignore[arg-type]
            with pytest.raises(ServerUnreachable, match=r"(?i)connection refused.*lifecycle serve"):
                await client.generate("hi")
            assert not await client.is_ready()
            with pytest.raises(ServerUnreachable, match=r"not ready after 0\.3 s"):
                await client.wait_ready(0.3)

    asyncio.run(main())


def test_readiness_and_models(fakes: FrontEnds, protocol: str):
    """The client sees whether its model is ready, and which ones are."""

    async def work(client: AsyncClient) -> None:
        await client.wait_ready(2)
        assert await client.is_ready()
        assert await client.models() == [MODEL]
        client.model = "other"
        assert not await client.is_ready()

    drive(fakes, protocol, work)


def test_a_model_is_unloaded_once_it_is_drained(fakes: FrontEnds, protocol: str):
    """It is told to drain until nothing is live, then unloaded, and gone when Triton says so."""
    left = iter([2, 1, 0])

    def model(ask: Ask) -> Iterator[Say | Fail]:
        assert (ask.parameters["control"], fakes.state) == ("drain", "READY")
        yield Say(json.dumps({"draining": True, "live": next(left), "limit": 20.0}))

    async def work(client: AsyncClient) -> None:
        seen: list[int] = []
        assert await client.unload(lambda found: seen.append(found.live)) > 0
        assert seen == [2, 1]
        assert await client.models() == []

    fakes.model = model
    drive(fakes, protocol, work)


def test_a_model_that_triton_does_not_unload_takes_requests_again(fakes: FrontEnds, protocol: str):
    """The error says which setting lets it, and the drain is taken back."""

    def model(ask: Ask) -> Iterator[Say | Fail]:
        yield Say(json.dumps({"draining": ask.parameters["control"] == "drain", "live": 0, "limit": 20.0}))

    async def work(client: AsyncClient) -> None:
        with pytest.raises(tree.Unsupported, match="model-control-mode=explicit"):
            await client.unload()

    fakes.refuses_unload = "explicit model load / unload is not allowed if polling is enabled"
    fakes.model = model
    drive(fakes, protocol, work)
    assert [ask.parameters["control"] for ask in fakes.asked] == ["drain", "resume"]


def test_a_drain_that_its_limit_does_not_end_is_told(fakes: FrontEnds, protocol: str, monkeypatch: pytest.MonkeyPatch):
    """Requests that are left behind the limit are an error, after a bounded time."""
    monkeypatch.setattr(client_module, "_DRAIN_MARGIN_S", 0.3)
    fakes.model = lambda _: iter([Say('{"draining": true, "live": 3, "limit": 0.1}')])

    async def work(client: AsyncClient) -> None:
        with pytest.raises(tree.TotalTimeout, match="3 requests are left"):
            await client.drained()

    drive(fakes, protocol, work)


def test_control_requests(fakes: FrontEnds, protocol: str):
    """Status, cancel and state are answered with documents; an unknown id is an error of its own."""

    def model(ask: Ask) -> Iterator[Say | Fail]:
        assert ask.prompt == ""
        if ask.parameters.get("control_id") == "nobody":
            yield Fail("unknown_request: no request 'nobody' is live or kept")
        elif ask.parameters["control"] == "status":
            yield Say(json.dumps({
                "id": "u", "caller_id": "r", "model": "m", "status": "finished", "stage": "respond", "slug": None,
                "times_ms": {"received": 0.0, "finished": 2.5}, "received_at": 1.0, "prompt_tokens": 3,
                "cached_tokens": None, "output_tokens": 4, "attempts": 1, "finish_reason": "stop", "new": [1],
            }))  # fmt: skip
        elif ask.parameters["control"] == "cancel":
            yield Say('{"id": "u", "cancelled": false}')
        else:
            yield Say('{"live": 2, "engine": {"running": 1, "waiting": 1, "requests": 2}, "counts": {"received": 9}}')

    fakes.model = model

    async def work(client: AsyncClient) -> None:
        status = await client.status("r")
        assert (status.status, status.times_ms["finished"], status.output_tokens) == ("finished", 2.5, 4)
        assert not await client.cancel("r")
        state = await client.state()
        assert (state.live, state.engine["waiting"], state.counts["received"]) == (2, 1, 9)
        with pytest.raises(tree.UnknownRequest, match="nobody"):
            await client.status("nobody")

    drive(fakes, protocol, work)


def test_closing_the_client_ends_what_waits(fakes: FrontEnds, protocol: str):
    """Waiting callers get an error of ours, promptly; a closed client takes nothing more."""
    fakes.model = waits()

    async def work(client: AsyncClient) -> None:
        task = asyncio.create_task(client.generate("hi"))
        await eventually(lambda: fakes.asked)
        begin = time.monotonic()
        await client.aclose()
        with pytest.raises(tree.Cancelled, match="closed"):
            await task
        assert time.monotonic() - begin < 10, "the server says nothing for ever"
        with pytest.raises(tree.Cancelled, match="closed"):
            await client.generate("hi")

    drive(fakes, protocol, work)


def test_a_broken_stream_is_continued_from_its_tokens(fakes: FrontEnds, protocol: str):
    """The connection breaks in the middle; the next request brings the tokens along, as an input."""
    attempts = iter([[Say("on", ids=(7,)), Say("ce", "None", 2, (8, 9)), Drop()], [Say(" upon", "stop", 1, (5,))]])
    fakes.model = lambda _: iter(next(attempts))

    async def work(client: AsyncClient) -> None:
        coming = client.stream("hi", temperature=0.7)
        assert [chunk.text async for chunk in coming] == ["on", "ce", " upon"]
        assert coming.completion.output_tokens == 4
        first, second = fakes.asked
        assert first.parameters["return_token_ids"] is True
        assert "continue_token_ids" not in first.inputs
        assert (second.id, second.prompt, second.inputs["continue_token_ids"]) == (first.id, "hi", [7, 8, 9])

    drive(fakes, protocol, work)


@pytest.mark.parametrize(
    ("options", "seconds"),
    [
        ({"parameters": {"timeout_ms": 1500}}, 1.5),
        ({"parameters": {"timeout_ms": 1500}, "timeout": 5}, 1.5),
        ({"parameters": {"timeout_ms": 9000}, "timeout": 5}, 5),
        ({"parameters": {"timeout_ms": 400_000}}, 400),
        ({"parameters": {"timeout_ms": 0}}, 300),
    ],
)
def test_a_timeout_among_the_parameters_counts(
    fakes: FrontEnds, protocol: str, options: dict[str, Any], seconds: float
):
    """`timeout_ms` there is the request's timeout, over both protocols; the shorter of it and `timeout` wins."""

    async def work(client: AsyncClient) -> None:
        await client.generate("hi", **options)
        (ask,) = fakes.asked
        assert ask.parameters["timeout"] == seconds * 1e6
        assert ask.parameters.get("timeout_ms", seconds * 1e3) == seconds * 1e3

    drive(fakes, protocol, work)


@pytest.mark.parametrize("wrong", [-5, True, "soon", float("nan")])
def test_a_wrong_timeout_among_the_parameters_is_refused(wrong: object):
    """The message names the parameter, its unit and what was found."""
    with (
        Client("127.0.0.1:1") as client,
        pytest.raises(tree.InvalidInput, match=r"'timeout_ms' must be milliseconds above 0, got"),
    ):
        client.generate("hi", parameters={"timeout_ms": wrong})  # type: ignore[dict-item]


def test_wrong_arguments_never_leave_the_client(fakes: FrontEnds, protocol: str):
    """An unknown option, a timeout of 0 and a prompt that is no text are refused here."""

    async def work(client: AsyncClient) -> None:
        for options in ({"max_tokenz": 1}, {"timeout": 0}, {"timeout": float("inf")}, {"parameters": {"x": []}}):
            with pytest.raises(tree.InvalidInput):
                await client.generate("hi", **options)  # type: ignore[arg-type]
        with pytest.raises(tree.InvalidInput, match="prompt must be a string, got bytes"):
            client.stream(b"hi")  # type: ignore[arg-type]
        assert not fakes.asked

    drive(fakes, protocol, work)


def test_the_blocking_client(fakes: FrontEnds, protocol: str):
    """It streams, adds up, and cancels by leaving the loop; afterwards its thread is gone."""
    fakes.model = lambda ask: iter(STREAM) if ask.prompt == "short" else waits(Say("a"))(ask)
    with Client(fakes.url(protocol), model=MODEL, protocol=protocol) as client:  # type: ignore[arg-type]
        assert client.is_ready()
        with client.stream("short") as stream:
            assert [chunk.text for chunk in stream] == ["Pa", "ris 😀", "世"]
        assert stream.completion.text == stream.text == "Paris 😀世"
        assert list(stream) == []
        for _ in client.stream("long"):
            break
        assert fakes.prompts[1].left.wait(30)
        named = client.stream("named")
        for _ in named:
            break
        assert fakes.prompts[2].left.wait(30)
        assert (named.text, list(named)) == ("a", [])
        failed = client.stream("failed")
        with suppress(ZeroDivisionError):
            for _ in failed:
                raise ZeroDivisionError
        assert fakes.prompts[3].left.wait(30)
    with pytest.raises(tree.Cancelled, match="closed"):
        client.generate("short")
    assert "lifecycle-client" not in [thread.name for thread in threading.enumerate()]


def test_an_interrupt_between_two_lines_cancels_all_the_same(
    fakes: FrontEnds, protocol: str, monkeypatch: pytest.MonkeyPatch
):
    """Ctrl-C in the moment in which a step has begun and nobody waits for it yet cancels the request at once."""

    def slow(ask: Ask) -> Iterator[Say]:
        yield Say("a")
        ask.left.wait(10)
        yield Say("b")

    fakes.model = slow
    with Client(fakes.url(protocol), model=MODEL, protocol=protocol) as client:  # type: ignore[arg-type]
        stream = client.stream("p")
        assert next(stream).text == "a"
        submit, pressed = stream._loop.submit, []

        def interrupted(work: object) -> object:
            future = submit(work)  # type: ignore[arg-type]
            if not pressed:
                pressed.append(time.sleep(0.1))
                raise KeyboardInterrupt
            return future

        monkeypatch.setattr(stream._loop, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(stream)
        assert stream._step is not None
        until(stream._step.done)
        assert stream._step.cancelled()
        if protocol == "grpc":
            assert fakes.asked[0].left.wait(30)


def test_an_interrupt_just_before_the_wait_is_not_lost(fakes: FrontEnds, monkeypatch: pytest.MonkeyPatch):
    """Python handles a signal that arrives as the thread blocks only once it wakes: the wait wakes by itself."""
    woken = []
    waits = Future.exception

    def counted(future: Future[object], timeout: float | None = None) -> BaseException | None:
        woken.append(timeout)
        return waits(future, timeout)

    monkeypatch.setattr(Future, "exception", counted)
    fakes.model = lambda ask: iter([Say("a", "stop")] if not ask.left.wait(0.7) else [])
    with Client(fakes.grpc, model=MODEL) as client:
        assert client.generate("p").text == "a"
    assert len(woken) >= 2
    assert all(timeout is not None and timeout <= 0.5 for timeout in woken)


def test_blocking_clients_work_from_many_threads(fakes: FrontEnds, protocol: str):
    """Several clients and threads share one event loop without disturbing each other."""
    fakes.model = says(*STREAM)
    texts: list[str] = []

    def work(client: Client) -> None:
        texts.extend("".join(chunk.text for chunk in client.stream("hi")) for _ in range(5))

    with (
        Client(fakes.url(protocol), model=MODEL, protocol=protocol) as one,  # type: ignore[arg-type]
        Client(fakes.url(protocol), model=MODEL, protocol=protocol) as two,  # type: ignore[arg-type]
    ):
        threads = [threading.Thread(target=work, args=(client,)) for client in (one, two, one, two)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert texts == ["Paris 😀世"] * 20


def _expect(kind: type[tree.LifecycleError], match: str | None = None) -> Callable[[AsyncClient], Awaitable[None]]:
    async def work(client: AsyncClient) -> None:
        with pytest.raises(kind, match=match):
            async for _ in client.stream("hi"):
                pass

    return work


def test_tls_where_there_is_none_is_said(fakes: FrontEnds):
    """`https://` to a server that speaks plain HTTP: the message says so; where nobody listens it says that."""

    async def scenario(url: str) -> None:
        async with AsyncClient(url, model=MODEL, retry=NO_RETRY) as client:
            await client.generate("hi")

    with pytest.raises(ServerUnreachable, match=r"does not speak TLS; .* http://"):
        asyncio.run(scenario(f"https://{fakes.http}"))
    with pytest.raises(ServerUnreachable, match="nothing answers at https://"):
        asyncio.run(scenario("https://127.0.0.1:1"))
