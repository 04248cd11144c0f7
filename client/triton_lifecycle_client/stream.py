"""One answer on its way: the chunks as they come, and what they add up to."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from .errors import ProtocolError
from .types import Completion

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from types import TracebackType
    from typing import Self

    from .types import Chunk, GenerateRequest


class Tally:
    """What a request has brought so far."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.attempts = 0
        self.first_chunk_s: float | None = None
        self.total_s: float | None = None
        self.prompt_tokens: int | None = None
        self.output_tokens = 0
        self._texts: list[list[str]] = []
        self._reasons: list[str | None] = []

    def add(self, chunk: Chunk) -> None:
        """Take one chunk in."""
        if self.first_chunk_s is None:
            self.first_chunk_s = time.monotonic() - self.started
        for index, text in enumerate(chunk.texts):
            if index == len(self._texts):
                self._texts.append([])
                self._reasons.append(None)
            self._texts[index].append(text)
        for index, reason in enumerate(chunk.finish_reasons[: len(self._reasons)]):
            self._reasons[index] = reason or self._reasons[index]
        self.output_tokens += chunk.output_tokens
        self.prompt_tokens = self.prompt_tokens if chunk.prompt_tokens is None else chunk.prompt_tokens

    @property
    def texts(self) -> tuple[str, ...]:
        """The text so far, by sequence."""
        return tuple("".join(parts) for parts in self._texts)

    @property
    def finish_reasons(self) -> tuple[str | None, ...]:
        """Why each sequence ended, so far."""
        return tuple(self._reasons)


class Stream:
    """The chunks of one answer: an async iterator, and an async context manager that cancels on the way out.

    Leaving ``async for`` early, by ``break`` or an error, cancels the request, whether the stream has a name or not.

    Attributes:
        request_id: good for ``status`` and ``cancel`` from the moment of the first chunk.

    """

    def __init__(self, request: GenerateRequest, tally: Tally, chunks: AsyncGenerator[Chunk, None]) -> None:
        self.request_id = request.request_id
        self._request = request
        self._tally = tally
        self._chunks = chunks

    async def __aiter__(self) -> AsyncGenerator[Chunk, None]:
        # An iterator of its own for each loop: only the loop holds it, so it is closed when the loop is left.
        try:
            while (chunk := await anext(self, None)) is not None:
                yield chunk
        finally:
            await self.aclose()

    async def __anext__(self) -> Chunk:
        try:
            chunk = await self._chunks.__anext__()
        except StopAsyncIteration:
            self._end()
            raise
        self._tally.add(chunk)
        return chunk

    @property
    def text(self) -> str:
        """Text of the first sequence so far."""
        return self._tally.texts[0] if self._tally.texts else ""

    @property
    def attempts(self) -> int:
        """How often the request was sent so far."""
        return self._tally.attempts

    @property
    def completion(self) -> Completion:
        """The answer as a whole, once the iteration has come to its end.

        Raises:
            RuntimeError: it has not.

        """
        tally = self._tally
        if tally.total_s is None or tally.first_chunk_s is None:
            raise RuntimeError("the stream has not come to its end")
        return Completion(
            request_id=self.request_id,
            model=self._request.model,
            texts=tally.texts,
            finish_reasons=tally.finish_reasons,
            prompt_tokens=tally.prompt_tokens,
            output_tokens=tally.output_tokens,
            first_chunk_s=tally.first_chunk_s,
            total_s=tally.total_s,
            attempts=tally.attempts,
        )

    async def aclose(self) -> None:
        """Cancel the request unless it has ended."""
        await self._chunks.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _end(self) -> None:
        if self._tally.total_s is None:
            self._tally.total_s = time.monotonic() - self._tally.started
            if not any(self._tally.finish_reasons):
                raise ProtocolError(
                    "the answer ended without a finish reason, so it may be cut short; "
                    f"{self._tally.output_tokens} tokens had arrived"
                )
