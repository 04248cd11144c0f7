"""The W3C trace context: what a caller's ``traceparent`` says, and what ours says to the engine."""

from __future__ import annotations

import re
from typing import Final

import msgspec

MAX_STATE: Final = 512
"""Characters of a ``tracestate`` that are carried on; a longer one is left out, as the standard allows."""

_FORM: Final = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})(?P<more>-.*)?"
)


class Parent(msgspec.Struct, frozen=True, gc=False):
    """The span that a request belongs to."""

    trace_id: str
    """32 hexadecimal digits."""
    span_id: str
    """16 of them."""
    sampled: bool
    state: str = ""


class TraceContext(msgspec.Struct, frozen=True, gc=False):
    """A request's own span: chosen on arrival, so that the engine's span can stand below it."""

    trace_id: str
    span_id: str
    sampled: bool
    parent_id: str = ""
    """The caller's span; empty where the trace begins here."""
    state: str = ""

    def headers(self) -> dict[str, str]:
        """Return what tells another program that its spans belong below this one."""
        found = {"traceparent": f"00-{self.trace_id}-{self.span_id}-{'01' if self.sampled else '00'}"}
        return found | {"tracestate": self.state} if self.state else found


def parse(traceparent: str, tracestate: str = "") -> Parent | None:
    """Return the caller's span, or ``None`` where there is none in the standard's form: then a new trace begins."""
    match = _FORM.fullmatch(traceparent.strip())
    if match is None or match["version"] == "ff" or (match["version"] == "00" and match["more"]):
        return None
    if not int(match["trace"], 16) or not int(match["span"], 16):
        return None
    sampled = bool(int(match["flags"], 16) & 1)
    return Parent(match["trace"], match["span"], sampled=sampled, state=bounded(tracestate))


def bounded(tracestate: str) -> str:
    """Return a ``tracestate`` as far as it is carried on: whole, or not at all."""
    return tracestate.strip() if len(tracestate) <= MAX_STATE and tracestate.isascii() else ""
