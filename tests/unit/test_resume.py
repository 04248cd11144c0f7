"""A stream that broke goes on where it was, or says clearly why it cannot."""

from __future__ import annotations

import asyncio

import pytest

from triton_lifecycle.errors import Draining, GenerationFailed, InvalidInput, QueueFull, TotalTimeout, Unsupported
from triton_lifecycle_client import AsyncClient
from triton_lifecycle_client.errors import ResumeFailed, ServerUnreachable
from triton_lifecycle_client.retry import NO_RETRY, RetryPolicy
from triton_lifecycle_client.types import Chunk

QUICK = RetryPolicy(base_s=0.001)


def part(text, reason=None, tokens=1):
    return Chunk((text,), (reason,), (tokens,), 3)


def told(text, *ids, reason=None, prompt=3):
    """Return a piece whose tokens the server tells."""
    return Chunk((text,), (reason,), (len(ids),), prompt, ids)


class Scripted:
    """A transport whose attempts are lists of chunks, each with an error at its end or none."""

    def __init__(self, *attempts):
        self.attempts = list(attempts)
        self.sent = []

    async def exchange(self, request, _limit):
        self.sent.append(request)
        for item in self.attempts.pop(0):
            if isinstance(item, Exception):
                raise item
            yield item


def stream(*attempts, retry=QUICK, **options):
    """Return the pieces that the caller saw, the whole, and the transport."""

    async def read():
        client = AsyncClient("127.0.0.1:1", model="m", retry=retry)
        client._transport = transport = Scripted(*attempts)
        answer = client.stream("p", **{"temperature": 0.0, **options})
        pieces = [chunk.text async for chunk in answer]
        return pieces, answer.completion, transport

    return asyncio.run(read())


@pytest.mark.parametrize("error", [ServerUnreachable("gone"), Draining("stopping")])
def test_a_broken_stream_goes_on_where_it_was(error):
    """However the new answer is cut into pieces, each text and each token is there once."""
    again = [part("on", tokens=1), part("ce upon a", tokens=3), part(" time", "length", tokens=1)]
    pieces, whole, transport = stream([part("once"), part(" upon"), error], again)
    assert pieces == ["once", " upon", " a", " time"]
    assert (whole.text, whole.output_tokens, whole.attempts) == ("once upon a time", 5, 2)
    assert transport.sent[1].request_id == transport.sent[0].request_id
    assert transport.sent[1].timeout < transport.sent[0].timeout


def test_it_may_break_twice():
    """Also when the second attempt breaks before it has come to what is known."""
    pieces, whole, _ = stream(
        [part("a"), part("b"), ServerUnreachable("gone")],
        [part("a"), ServerUnreachable("gone")],
        [part("abc", "stop", tokens=3)],
    )
    assert (pieces, whole.output_tokens, whole.attempts) == (["a", "b", "c"], 3, 3)


@pytest.mark.parametrize("second", [[part("x"), part("y", "stop")], [part("a", "stop")]])
def test_another_answer_is_not_passed_on(second):
    """An answer that differs from what was received, or ends before it, is an error of its own."""
    with pytest.raises(ResumeFailed, match="differs from what was received"):
        stream([part("a"), part("b"), ServerUnreachable("gone")], second)


@pytest.mark.parametrize("options", [{"temperature": 0.7}, {"temperature": 0.7, "seed": 3}, {"temperature": None}])
def test_a_random_answer_is_not_resumed(options):
    """Where another attempt would not be the same the caller is told so, and nothing is sent again."""
    with pytest.raises(ResumeFailed, match=r"gone; the answer had begun and cannot go on elsewhere"):
        stream([part("a"), ServerUnreachable("gone")], [part("a", "stop")], **options)


def test_an_answer_that_has_only_begun_is_asked_anew():
    """Of a response without text or token nothing can be contradicted, whatever the temperature."""
    pieces, whole, _ = stream([part("", tokens=0), ServerUnreachable("gone")], [part("a", "stop")], temperature=0.7)
    assert (pieces, whole.output_tokens) == (["", "a"], 1)


def test_what_is_no_broken_connection_is_not_resumed():
    """An error of the request itself, after the answer has begun, goes to the caller as it is."""
    with pytest.raises(QueueFull):
        stream([part("a"), QueueFull("full")], [part("a", "stop")])


def test_without_retries_nothing_is_resumed():
    """`NO_RETRY` leaves a broken stream broken, with its own reason."""
    with pytest.raises(ServerUnreachable, match="gone") as caught:
        stream([part("a"), ServerUnreachable("gone")], [part("a", "stop")], retry=NO_RETRY)
    assert not isinstance(caught.value, ResumeFailed)


@pytest.mark.parametrize(("retry", "asked"), [(QUICK, True), (NO_RETRY, False)])
def test_tokens_are_asked_for_where_they_may_be_needed(retry, asked):
    """A client that sends nothing twice spares the server the telling."""
    _, _, transport = stream([part("a", "stop")], retry=retry)
    assert transport.sent[0].return_token_ids is asked


BEGINNING = [told("on", 7), told("ce", 8, 9), ServerUnreachable("gone")]


@pytest.mark.parametrize("temperature", [0.0, 0.7, None])
def test_from_tokens_a_stream_goes_on_at_any_temperature(temperature):
    """The next server gets the tokens that are there, and all that it says is new."""
    rest = [told(" upon", 5, prompt=6), told(" a time", 4, 3, reason="length", prompt=6)]
    pieces, whole, transport = stream(BEGINNING, rest, temperature=temperature)
    assert pieces == ["on", "ce", " upon", " a time"]
    assert (whole.output_tokens, whole.prompt_tokens, whole.attempts) == (6, 3, 2)
    assert [sent.continued for sent in transport.sent] == [(), (7, 8, 9)]


def test_from_tokens_it_may_break_again_and_again():
    """Also before anything new has come; each time all that is there is sent along."""
    pieces, whole, transport = stream(
        BEGINNING,
        [Draining("stopping")],
        [told("", 5), ServerUnreachable("gone")],
        [told(" upon", 4, reason="stop")],
        retry=RetryPolicy(base_s=0.001, attempts=4),
    )
    assert ("".join(pieces), whole.output_tokens) == ("once upon", 5)
    assert [sent.continued for sent in transport.sent] == [(), (7, 8, 9), (7, 8, 9), (7, 8, 9, 5)]


@pytest.mark.parametrize(
    "says", [Unsupported("not exactly"), InvalidInput("unexpected inference input"), GenerationFailed("no")]
)
def test_where_the_next_server_does_not_continue_it_repeats(says):
    """At temperature 0 the request is sent once more as it was, and what is there is left out of the answer."""
    again = [told("once", 7, 8, 9), told(" upon", 5, reason="stop")]
    pieces, whole, transport = stream(BEGINNING, [says], again, retry=RetryPolicy(base_s=0.001, attempts=2))
    assert (pieces, whole.output_tokens) == (["on", "ce", " upon"], 4)
    assert [sent.continued for sent in transport.sent] == [(), (7, 8, 9), ()]


def test_a_random_answer_that_no_server_continues_ends_with_the_reason_why_it_broke():
    """It is not sent again as a whole: another attempt would not be the same."""
    with pytest.raises(ResumeFailed, match="gone; the answer had begun and cannot go on elsewhere"):
        stream(BEGINNING, [Unsupported("not exactly")], [told("x", 1, reason="stop")], temperature=0.7)


def test_a_server_that_has_no_place_for_the_rest_is_asked_again():
    """A refusal that may pass is waited out, like any request's."""
    pieces, _, transport = stream(
        BEGINNING, [QueueFull("full", retry_after=0.01)], [told(" upon", 5, reason="stop")], temperature=0.7
    )
    assert pieces == ["on", "ce", " upon"]
    assert [sent.continued for sent in transport.sent] == [(), (7, 8, 9), (7, 8, 9)]


def test_a_continued_request_whose_time_is_over_is_over():
    """A deadline is no reason to ask otherwise."""
    with pytest.raises(TotalTimeout):
        stream(BEGINNING, [TotalTimeout("late")], [told("once", 7, 8, 9, reason="stop")])


@pytest.mark.parametrize(
    "beginning",
    [[told("on", 7), part("ce", tokens=2)], [Chunk(("on", "x"), (None, None), (1, 1), 3), part("ce", tokens=2)]],
    ids=["not all told", "several sequences"],
)
def test_without_every_token_it_repeats(beginning):
    """What the server has told only in part cannot be continued from."""
    _, _, transport = stream(
        [*beginning, ServerUnreachable("gone")],
        [Chunk(("once", "x"), ("stop", "stop"), (3, 1), 3)],
    )
    assert [sent.continued for sent in transport.sent] == [(), ()]
