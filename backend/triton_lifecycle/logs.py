"""Logs: one line per record, as JSON or text, with the request that it is about; repeats are counted, not written.

No prompt and no output text is ever logged. Lines go to standard error, where Triton writes its own, or through
Triton's logger, which also knows of its log file (``monitoring.log_to``).
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from logging.handlers import QueueHandler, QueueListener
from typing import TYPE_CHECKING, Any, Final

from triton_lifecycle.config import Monitoring

if TYPE_CHECKING:
    from triton_lifecycle.context import Context

ROOT = "triton_lifecycle"
FIELDS: Final = ("request_id", "caller_id", "tenant", "stage", "slug")
"""What a record about a request tells beside its message."""
BURST: Final = 10
"""Lines of one kind that are written within a window; further ones are counted."""
WINDOW_S: Final = 10.0
MAX_KINDS: Final = 1000
"""Kinds of lines that are counted at once; the one longest unseen is forgotten first."""
CLOSE_S: Final = 2.0
"""What writing the last lines may take."""
QUEUE: Final = 10_000
"""Lines that may wait for Triton's logger; more are dropped and counted."""


def about(ctx: Context, slug: str | None = None) -> dict[str, Any]:
    """Return ``extra`` for a record about a request."""
    known = (ctx.id, ctx.metadata.caller_id, ctx.metadata.tenant, ctx.execution.stage, slug)
    return {name: value for name, value in zip(FIELDS, known, strict=True) if value}


class JsonFormatter(logging.Formatter):
    """One JSON object per record: time, level, logger, message, the request, and the error if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line of JSON."""
        fields: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_request(record),
        }
        if repeated := getattr(record, "repeated", 0):
            fields["repeated"] = repeated
        if record.exc_info:
            fields["error"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """One line of text per record, the request behind the message."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the library's name
        """Return the line, before a trace is added."""
        told = " ".join(f"{name}={value!r}" for name, value in _request(record).items())
        return super().formatMessage(record) + (f" [{told}]" if told else "")


class Repeats(logging.Filter):
    """Lets :data:`BURST` lines of one kind pass within a window; the next that passes tells how many did not.

    Lines are of one kind when logger, level, message before its values are put in, and slug are the same.

    Args:
        clock: monotonic seconds.

    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._lock = threading.Lock()
        self._kinds: OrderedDict[tuple[Any, ...], _Kind] = OrderedDict()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is written."""
        with self._lock:
            return self._passes(record)

    @property
    def untold(self) -> int:
        """Lines that were held back and that no later line has told of."""
        with self._lock:
            return sum(kind.held for kind in self._kinds.values())

    def _passes(self, record: logging.LogRecord) -> bool:
        key = (record.name, record.levelno, record.msg, getattr(record, "slug", None))
        kind, now = self._kinds.get(key), self._clock()
        if kind is None or now - kind.began >= WINDOW_S:
            held = 0 if kind is None else kind.held
            kind = self._kinds[key] = _Kind(now)
            if held:
                record.repeated = held
                record.msg, record.args = f"{record.getMessage()} (repeated {held} times before)", ()
        self._kinds.move_to_end(key)
        if len(self._kinds) > MAX_KINDS:
            self._kinds.popitem(last=False)
        kind.seen += 1
        if kind.seen <= BURST:
            return True
        kind.held += 1
        return False


class _Kind:
    __slots__ = ("began", "held", "seen")

    def __init__(self, began: float) -> None:
        self.began = began
        self.seen = 0
        self.held = 0


class TritonHandler(logging.Handler):
    """Writes through ``pb_utils.Logger``. Each line is a round trip to the server: never on the event loop."""

    def __init__(self, logger: Any) -> None:  # noqa: ANN401 - exists only inside Triton
        super().__init__()
        self._ways = {
            logging.ERROR: logger.log_error,
            logging.WARNING: logger.log_warn,
            logging.INFO: logger.log_info,
            logging.DEBUG: logger.log_verbose,
        }

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line, at the level that Triton has for it."""
        try:
            level = next((level for level in self._ways if record.levelno >= level), logging.DEBUG)
            self._ways[level](self.format(record))
        except Exception:  # noqa: BLE001 - a line that cannot be written costs nothing but itself
            self.handleError(record)


class _Bounded(QueueHandler):
    """Hands records to a thread; drops and counts those that find the queue full."""

    dropped = 0

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Leave the record as it is: the thread is in the same process."""
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1


class _Listener(QueueListener):
    """Ends within a limit also when its queue is full and the server's logger stands still."""

    hangs = False
    """Whether it ended without having written everything."""

    def enqueue_sentinel(self) -> None:
        self.queue.put(self._sentinel, timeout=CLOSE_S)  # type: ignore[attr-defined]

    def stop(self) -> None:
        thread = self._thread
        with contextlib.suppress(queue.Full):
            self.enqueue_sentinel()
        if thread is not None:
            thread.join(CLOSE_S)
            self.hangs = thread.is_alive()
        self._thread = None


_listener: _Listener | None = None


def configure(settings: Monitoring, pb: Any = None) -> None:  # noqa: ANN401 - exists only inside Triton
    """Set up this package's loggers; other libraries' loggers are left alone.

    Args:
        settings: what is logged, and how.
        pb: the module ``triton_python_backend_utils``; without it lines go to standard error.

    """
    close()
    logger = logging.getLogger(ROOT)
    logger.handlers.clear()
    logger.propagate = False
    if not (settings.enabled and settings.logging_enabled):
        logger.addHandler(logging.NullHandler())
        return
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    to_triton = settings.log_to == "triton" and hasattr(pb, "Logger")
    if to_triton:
        handler = TritonHandler(pb.Logger)
    handler.setFormatter(JsonFormatter() if settings.log_format == "json" else TextFormatter())
    front = _threaded(handler) if to_triton else handler
    front.addFilter(Repeats())
    logger.addHandler(front)
    logger.setLevel(settings.log_level.upper())


def close() -> None:
    """Write what waits and end the thread that writes, if there is one."""
    global _listener  # noqa: PLW0603 - like the loggers, one for the process
    logger = logging.getLogger(ROOT)
    for repeats in [found for handler in logger.handlers for found in handler.filters if isinstance(found, Repeats)]:
        if untold := repeats.untold:
            logger.info("%d more repeated lines were not written", untold)
    if _listener is None:
        return
    _listener.stop()
    for dropped in [handler.dropped for handler in logger.handlers if isinstance(handler, _Bounded)]:
        if dropped and not _listener.hangs:
            # Straight to where lines end: the queue may be full, and nobody reads it any more.
            said = "%d lines were lost: the server's logger was too slow for them"
            _listener.handle(logger.makeRecord(ROOT, logging.WARNING, __file__, 0, said, (dropped,), None))
    _listener = None


def _threaded(handler: logging.Handler) -> logging.Handler:
    global _listener  # noqa: PLW0603
    lines: queue.Queue[Any] = queue.Queue(QUEUE)
    _listener = _Listener(lines, handler)
    _listener.start()
    return _Bounded(lines)


def _request(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name in FIELDS if (value := getattr(record, name, None)) is not None}
