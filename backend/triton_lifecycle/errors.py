"""Every way a request can end badly, as one tree.

Each leaf carries a ``slug`` (its stable name), the Triton status ``code`` it travels under, and whether the same
request may be sent again. Only code and message survive on the wire, so :meth:`LifecycleError.wire` puts the slug
first, and :func:`from_wire` turns such a text back into the same class on the client's side.
"""

from __future__ import annotations

import re
from typing import ClassVar, Literal

Code = Literal["INVALID_ARG", "NOT_FOUND", "UNSUPPORTED", "UNAVAILABLE", "CANCELLED", "INTERNAL"]
"""Names of ``pb_utils.TritonError`` codes. Triton has no code for a deadline; those travel as UNAVAILABLE."""


class LifecycleError(Exception):
    """Base of all errors that may reach a caller.

    Args:
        message: what was wrong, where, and what to do, without the slug.
        retry_after: seconds after which the same request may succeed; ``None`` when waiting does not help.

    """

    slug: ClassVar[str] = "internal"
    code: ClassVar[Code] = "INTERNAL"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after = retry_after

    def wire(self) -> str:
        """Return the text a caller sees: ``slug: message``, ending in the retry hint if there is one."""
        hint = "" if self.retry_after is None else f"; retry after {self.retry_after:.1f} s"
        return f"{self.slug}: {self.message}{hint}"


class RequestError(LifecycleError):
    """The caller's request cannot be served as it stands; sending it again changes nothing."""

    slug = "invalid_request"
    code: ClassVar[Code] = "INVALID_ARG"


class InvalidInput(RequestError):
    """A value of the request breaks a rule; the message names field, value and rule."""

    slug = "invalid_input"


class PromptTooLong(RequestError):
    """The prompt leaves no room for even one output token."""

    slug = "prompt_too_long"


class UnknownAdapter(RequestError):
    """The named LoRA adapter is not loaded."""

    slug = "unknown_adapter"
    code: ClassVar[Code] = "NOT_FOUND"


class UnknownRequest(RequestError):
    """A control request names an id that is neither live nor kept."""

    slug = "unknown_request"
    code: ClassVar[Code] = "NOT_FOUND"


class Forbidden(RequestError):
    """A control request without the token that the server wants for it."""

    slug = "forbidden"


class Unsupported(RequestError):
    """The loaded model or this configuration cannot do what was asked."""

    slug = "unsupported"
    code: ClassVar[Code] = "UNSUPPORTED"


class Overloaded(LifecycleError):
    """The server refuses the request at once instead of letting it wait in vain."""

    slug = "overloaded"
    code: ClassVar[Code] = "UNAVAILABLE"
    retryable = True


class QueueFull(Overloaded):
    """The bounded number of requests is reached."""

    slug = "queue_full"


class TokenBudget(Overloaded):
    """The bounded number of prompt tokens is reached."""

    slug = "token_budget"


class DeadlineUnreachable(Overloaded):
    """The request's predicted end lies behind its deadline."""

    slug = "deadline_unreachable"


class Draining(Overloaded):
    """The server is stopping and takes no new work; also ends work that outlasts the drain limit."""

    slug = "draining"


class DeadlineExceeded(LifecycleError):
    """A time limit passed; the message names the limit, its value, and the tokens sent before."""

    slug = "deadline_exceeded"
    code: ClassVar[Code] = "UNAVAILABLE"


class FirstTokenTimeout(DeadlineExceeded):
    """No token arrived within the first-token limit."""

    slug = "first_token_timeout"


class StallTimeout(DeadlineExceeded):
    """The gap since the last token exceeded the stall limit."""

    slug = "stall_timeout"


class TotalTimeout(DeadlineExceeded):
    """The whole request exceeded its total limit."""

    slug = "total_timeout"


class Cancelled(LifecycleError):
    """The caller left or asked for the request to end."""

    slug = "cancelled"
    code: ClassVar[Code] = "CANCELLED"


class CallerLeft(Cancelled):
    """The caller closed its stream: nobody is there to be told."""

    slug = "caller_left"


class PluginFailed(LifecycleError):
    """A plug-in stage raised, did not return in time, or handed on what nobody understands; the message names it."""

    slug = "plugin_failed"


class EngineError(LifecycleError):
    """The engine failed, not the request."""

    slug = "engine_error"


class GenerationFailed(EngineError):
    """The engine raised while it worked on this request; other requests go on."""

    slug = "generation_failed"


class EngineDied(EngineError):
    """The engine's process is gone; every request on it is affected. Internal: triggers recovery."""

    slug = "engine_died"
    code: ClassVar[Code] = "UNAVAILABLE"
    retryable = True


class EngineRestarting(EngineError):
    """The engine is being restarted; the request may be sent again."""

    slug = "engine_restarting"
    code: ClassVar[Code] = "UNAVAILABLE"
    retryable = True


class StoreError(LifecycleError):
    """The store of contexts does not answer. Never ends a request: only a question about one can meet it."""

    slug = "store_unavailable"
    code: ClassVar[Code] = "UNAVAILABLE"
    retryable = True


class ConfigError(LifecycleError):
    """The configuration is wrong; raised at start-up only, listing every problem at once."""

    slug = "config_error"


def _leaves(root: type[LifecycleError]) -> dict[str, type[LifecycleError]]:
    found = {root.slug: root}
    for child in root.__subclasses__():
        found.update(_leaves(child))
    return found


BY_SLUG: dict[str, type[LifecycleError]] = _leaves(LifecycleError)
"""Every class of the tree by its slug."""

_WIRE = re.compile(
    rf"\b(?P<slug>{'|'.join(sorted(BY_SLUG, key=len, reverse=True))}): "
    r"(?P<message>.*?)(?:; retry after (?P<after>[0-9.]+) s)?$",
    re.DOTALL,
)


def from_wire(text: str) -> LifecycleError | None:
    """Turn a message made by :meth:`LifecycleError.wire` back into its error; ``None`` if it is not one of ours.

    A front end's own words before the message do no harm.
    """
    match = _WIRE.search(text)
    if match is None:
        return None
    after = match["after"]
    return BY_SLUG[match["slug"]](match["message"], retry_after=float(after) if after else None)
