"""Errors that arise on the client's side, and the way from a server's answer back to the one error tree."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import ClassVar

from triton_lifecycle.errors import (
    BY_SLUG,
    Code,
    Draining,
    InvalidInput,
    LifecycleError,
    Overloaded,
    RequestError,
    TotalTimeout,
    Unsupported,
    from_wire,
)


class ServerUnreachable(LifecycleError):
    """Nothing answers at the address, it speaks another protocol, or the connection broke."""

    slug = "server_unreachable"
    code: ClassVar[Code] = "UNAVAILABLE"
    retryable = True


class WrongPort(ServerUnreachable):
    """Something answers at the address, but not in the protocol that was asked for."""

    slug = "wrong_port"
    retryable = False


class ResumeFailed(ServerUnreachable):
    """A stream broke after it had begun, and cannot go on exactly where it was."""

    slug = "resume_failed"
    retryable = False


class ModelNotFound(RequestError):
    """The server has no model of this name."""

    slug = "model_not_found"
    code: ClassVar[Code] = "NOT_FOUND"


class ProtocolError(LifecycleError):
    """The server's answer is not what a Triton with a language model sends."""

    slug = "protocol_error"


# Triton and its proxies may put text before our message; only a slug of ours that begins a word counts.
_OURS = re.compile(r"(?<![a-z_])(?:" + "|".join(sorted(BY_SLUG, key=len, reverse=True)) + r"): ")
_KNOWN: tuple[tuple[re.Pattern[str], Callable[[str, re.Match[str]], LifecycleError]], ...] = (
    # Said while it unloads a model, which is how it stops, and afterwards.
    (
        re.compile(r"model: '(?P<model>[^']*)' has no available versions", re.IGNORECASE),
        lambda _, found: Draining(
            f"model {found['model']!r} is being unloaded or is not loaded; the server may be stopping"
        ),
    ),
    (
        re.compile(r"unknown model|model .* (?:is )?not found|no available versions", re.IGNORECASE),
        lambda message, _: ModelNotFound(message),
    ),
    (
        re.compile(r"explicit model load / unload is not allowed", re.IGNORECASE),
        lambda *_: Unsupported(
            "this Triton loads and unloads no models by order; start it with --model-control-mode=explicit"
        ),
    ),
    (
        re.compile(r"server (?:is )?(?:stopping|exiting|not ready)|stopped accepting", re.IGNORECASE),
        lambda message, _: Draining(message),
    ),
    (
        re.compile(r"failed to parse the request JSON|Converting keyword", re.IGNORECASE),
        lambda message, _: InvalidInput(message),
    ),
)
"""What Triton itself says, and the error that stands for it."""

_BY_HTTP: dict[int, type[LifecycleError]] = {
    400: RequestError,
    404: RequestError,
    413: InvalidInput,
    429: Overloaded,
    501: Unsupported,
    502: ServerUnreachable,
    503: Overloaded,
    504: TotalTimeout,
}


def translate(text: str, *, http_status: int | None = None) -> LifecycleError:
    """Turn a server's error text, and its HTTP status if there is one, into the error it stands for."""
    ours = _OURS.search(text)
    if ours is not None:
        error = from_wire(text[ours.start() :])
        if error is not None:
            return error
    message = text.strip() or "the server gave no reason"
    for sign, error_of in _KNOWN:
        if (found := sign.search(text)) is not None:
            return error_of(message, found)
    return _BY_HTTP.get(http_status or 0, LifecycleError)(message)


def described(error: LifecycleError) -> dict[str, object]:
    """Return an error as the JSON object that the command line prints."""
    return {
        "slug": error.slug,
        "message": error.message,
        "retryable": error.retryable,
        "retry_after": error.retry_after,
    }
