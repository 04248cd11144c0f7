"""A load process: takes orders as JSON lines on stdin, answers each with one line on stdout, ends with its parent."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from load.loops import new_loop
from load.overhead.measure import Answer, BenchFailed, Order, Source, closed_loop

if TYPE_CHECKING:
    from typing import BinaryIO

LINE_LIMIT = 1 << 28


def make_source(kind: str, *where: str) -> Source:
    """Return the source of that kind: ``grpc`` or ``http`` (address, model), or ``bare`` (model version's folder)."""
    if kind == "grpc":
        from load.overhead.grpc_source import GrpcSource  # noqa: PLC0415

        return GrpcSource(*where)
    if kind == "http":
        from load.overhead.http_source import HttpSource  # noqa: PLC0415

        return HttpSource(*where)
    if kind == "bare":
        from load.overhead.bare_source import BareSource  # noqa: PLC0415

        return BareSource(*where)
    raise BenchFailed(f"no load of kind {kind!r}")


async def serve(source: Source, reader: asyncio.StreamReader, writer: BinaryIO) -> None:
    """Answer orders until the parent closes the pipe or dies, which ends a measurement under way too."""

    def say(answer: Answer) -> None:
        writer.write(msgspec.json.encode(answer) + b"\n")
        writer.flush()

    try:
        await source.open()
        say(Answer())
        line = await reader.readline()
        while line:
            measuring = asyncio.create_task(_answer(source, line))
            following = asyncio.create_task(reader.readline())
            await asyncio.wait({measuring, following}, return_when=asyncio.FIRST_COMPLETED)
            if following.done() and not following.result():
                measuring.cancel()
                await asyncio.wait({measuring})
                return
            say(await measuring)
            line = await following
    except Exception as error:  # noqa: BLE001 - the parent tells it
        with suppress(BrokenPipeError):
            say(Answer(error=_words(error)))
    finally:
        await source.close()


async def _answer(source: Source, line: bytes) -> Answer:
    try:
        return Answer(sample=await closed_loop(source, msgspec.json.decode(line, type=Order)))
    except Exception as error:  # noqa: BLE001 - the parent tells it
        return Answer(error=_words(error))


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, BenchFailed) else f"{type(error).__name__}: {error}"


async def _main(arguments: list[str]) -> None:
    # Libraries print to stdout; what the parent reads there must be ours alone.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    reader = asyncio.StreamReader(limit=LINE_LIMIT)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await serve(make_source(*arguments), reader, answers)


if __name__ == "__main__":
    # All sources alike, bare vLLM too, since our backend runs on it.
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(_main(sys.argv[1:]))
