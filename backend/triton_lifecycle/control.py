"""Control requests: questions and orders about other requests, carried in a request's parameters.

``control`` is ``status``, ``cancel`` or ``state``; ``control_id`` names the request (the caller's id or ours). They
hold no context, take no permit and never reach the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from triton_lifecycle.context import Context, Contexts
from triton_lifecycle.errors import Cancelled, InvalidInput

VERBS = ("status", "cancel", "state")


def answer(parameters: Mapping[str, Any], contexts: Contexts, state: Callable[[], dict[str, Any]]) -> str:
    """Carry out a control request.

    Args:
        parameters: the request's parameters; ``control`` is among them.
        contexts: where requests are found.
        state: makes the document that ``state`` answers.

    Returns:
        A JSON document.

    Raises:
        InvalidInput: the verb or the id is missing or unknown in form.
        UnknownRequest: no such request is live or kept.

    """
    verb = parameters.get("control")
    if verb == "state":
        return msgspec.json.encode(state()).decode()
    if verb not in VERBS:
        raise InvalidInput(f"control: expected one of {', '.join(VERBS)}, found {verb!r}")
    target = parameters.get("control_id")
    if not isinstance(target, str) or not target:
        raise InvalidInput(f"control_id: '{verb}' needs the id of a request")
    found = contexts.find(target)
    if verb == "status":
        summary = found.summary() if isinstance(found, Context) else found
        return msgspec.json.encode(summary).decode()
    cancelled = isinstance(found, Context) and found.interrupt(Cancelled("cancelled by a control request"))
    return msgspec.json.encode({"id": found.id, "cancelled": cancelled}).decode()
