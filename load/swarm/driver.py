"""The process that makes a Locust process's requests and measures them, on an event loop of its own.

It takes :class:`~load.swarm.protocol.Order` lines from a socket and answers each with an outcome. Times are taken here,
where nothing else runs. It ends, and leaves every request under way, when the other side of the socket goes.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from typing import TYPE_CHECKING, Final

import msgspec

from load.loops import new_loop
from load.swarm import deeds, plain
from load.swarm.protocol import LINE_LIMIT, Beat, Drop, Hello, Order, Outcome, ToDriver
from triton_lifecycle.errors import LifecycleError
from triton_lifecycle_client import AsyncClient, RetryPolicy

if TYPE_CHECKING:
    from collections.abc import Callable

    from load.swarm.protocol import Over

LOOK_S: Final = 0.02
BEAT_S: Final = 1.0
FAREWELL_S: Final = 5.0

_decode: Final = msgspec.json.Decoder(ToDriver).decode
_encode: Final = msgspec.json.Encoder().encode


class Driver:
    """Makes the requests that one Locust process orders.

    Args:
        hello: where they go.
        tell: takes a line for the other side.

    """

    def __init__(self, hello: Hello, tell: Callable[[bytes], None]) -> None:
        self._tell = tell
        self._tasks: dict[int, asyncio.Task[None]] = {}
        retry = RetryPolicy(attempts=hello.attempts)
        self._clients: dict[str, AsyncClient] = {}
        self._plain = plain.Plain(hello)
        for protocol, url in (("grpc", hello.grpc), ("http", hello.http)):
            if url:
                self._clients[protocol] = AsyncClient(
                    url,
                    model=hello.model,
                    protocol="grpc" if protocol == "grpc" else "http",
                    timeout=hello.timeout,
                    retry=retry,
                )

    def take(self, message: Order | Drop) -> None:
        """Begin a request, or leave one."""
        if isinstance(message, Drop):
            if (task := self._tasks.pop(message.id, None)) is not None:
                task.cancel()
            return
        task = asyncio.get_running_loop().create_task(self._request(message))
        self._tasks[message.id] = task

    async def beat(self) -> None:
        """Say that this process is ready; then once a second how late its loop wakes and how busy it is, for ever."""
        self._say(Beat([], 0.0))
        while True:
            lags: list[float] = []
            began, used = time.monotonic(), time.process_time()
            while (now := time.monotonic()) < began + BEAT_S:
                await asyncio.sleep(LOOK_S)
                lags.append(max(0.0, time.monotonic() - now - LOOK_S) * 1e3)
            cpu = (time.process_time() - used) / (time.monotonic() - began)
            self._say(Beat([round(lag, 3) for lag in lags], round(cpu, 3)))

    async def close(self) -> None:
        """Leave every request under way and close the connections."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=FAREWELL_S)
        for client in self._clients.values():
            await client.aclose()
        await self._plain.close()

    async def _request(self, order: Order) -> None:
        late = None
        if order.due is not None:
            if (early := order.due - time.monotonic()) > 0:
                await asyncio.sleep(early)
            late = max(0.0, time.monotonic() - order.due) * 1e3
        seen = deeds.Measured()
        error: LifecycleError | None = None
        try:
            if order.over == "tritonclient" and order.deed == "ask":
                await self._plain.ask(order, seen)
            else:
                await deeds.DO[order.deed](self._client(order.over), order, seen)
        except LifecycleError as caught:
            error = caught
        except Exception as caught:  # noqa: BLE001 - a fault of this tool is told as one, and ends no run
            error = LifecycleError(f"the load tool failed: {type(caught).__name__}: {caught}")
        slug, message = deeds.judge(order.deed, error)
        if self._tasks.pop(order.id, None) is None:
            return
        first = None if seen.first is None else round((seen.first - seen.sent) * 1e3, 3)
        self._say(
            Outcome(
                order.id,
                order.over,
                order.deed,
                slug=slug,
                message=message[:300],
                first=first,
                gaps=[round(gap, 3) for gap in seen.gaps],
                total=round((time.monotonic() - seen.sent) * 1e3, 3),
                tokens=seen.tokens,
                size=seen.size,
                late=late,
            )
        )

    def _client(self, over: Over) -> AsyncClient:
        return self._clients["grpc" if over in {"grpc", "tritonclient"} else "http"]

    def _say(self, message: Outcome | Beat) -> None:
        self._tell(_encode(message) + b"\n")


async def serve(connection: socket.socket) -> None:
    """Do what is ordered until the other side goes."""
    reader, writer = await asyncio.open_connection(sock=connection, limit=LINE_LIMIT)
    hello = _decode(await reader.readline())
    if not isinstance(hello, Hello):
        raise TypeError(f"expected a Hello, got {type(hello).__name__}")
    driver = Driver(hello, writer.write)
    beating = asyncio.create_task(driver.beat())
    try:
        while line := await reader.readline():
            message = _decode(line)
            if not isinstance(message, Hello):
                driver.take(message)
    except ConnectionError:
        pass  # the other side died: the same as going
    finally:
        beating.cancel()
        await driver.close()
        writer.close()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(serve(socket.socket(fileno=int(sys.argv[1]))))
