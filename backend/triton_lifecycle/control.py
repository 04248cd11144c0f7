"""Control requests: questions and orders about other requests, carried in a request's parameters.

``control`` is ``status``, ``cancel``, ``cancel_all``, ``state``, ``ready``, ``drain`` or ``resume``; ``control_id``
names the request of the first two (the caller's id or ours), ``control_token`` is the secret that the server may want.
``ready`` is for probes: an error where a new request would not be served now. ``drain`` has new requests refused and
gives those under way the drain's limit, ``resume`` takes that back. They hold no context, take no permit and never
reach the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from triton_lifecycle.config.urls import Token
from triton_lifecycle.context import Contexts
from triton_lifecycle.errors import Cancelled, Forbidden, InvalidInput, LifecycleError, UnknownRequest
from triton_lifecycle.store.archive import Archive
from triton_lifecycle.store.records import Summary

OPEN = frozenset({"ready"})
"""What anybody may ask: it says no more than Triton's own health does."""
OF_THE_WHOLE = ("state", "drain", "resume")
VERBS = ("status", "cancel", "cancel_all", "ready", *OF_THE_WHOLE)


class Served(Protocol):
    """The model as a whole, as far as control requests reach it."""

    def state(self) -> dict[str, Any]:
        """Return what it is doing."""
        ...

    def fault(self) -> LifecycleError | None:
        """Return why it takes no requests now; ``None`` when it does."""
        ...

    def drain(self) -> dict[str, Any]:
        """Refuse new requests from now on, and limit those under way; return how many they are."""
        ...

    def resume(self) -> dict[str, Any]:
        """Take new requests again.

        Raises:
            Draining: the model is being unloaded.

        """
        ...


def authorize(parameters: Mapping[str, Any], token: Token | None) -> None:
    """Let a control request pass that may be made.

    Raises:
        Forbidden: it needs the token and has not brought it.

    """
    if token is None or parameters.get("control") in OPEN or token.matches(parameters.get("control_token")):
        return
    raise Forbidden("this server answers control requests only with its control_token (security.control_token)")


async def answer(
    parameters: Mapping[str, Any],
    contexts: Contexts,
    archive: Archive,
    served: Served,
) -> str:
    """Carry out a control request, in a time that is bounded whatever the store does.

    Args:
        parameters: the request's parameters; ``control`` is among them.
        contexts: where live requests are found.
        archive: where all others are found, also those of other replicas.
        served: the model as a whole.

    Returns:
        A JSON document.

    Raises:
        InvalidInput: the verb or the id is missing or unknown in form.
        UnknownRequest: no such request is live or kept.
        LifecycleError: ``ready`` was asked, and this is why it is not; or the model cannot resume.
        StoreError: it is not known in this process, and the shared store does not answer.

    """
    verb = parameters.get("control")
    if verb == "ready":
        if (why := served.fault()) is not None:
            raise why
        return msgspec.json.encode({"ready": True}).decode()
    if verb in OF_THE_WHOLE:
        return msgspec.json.encode(getattr(served, verb)()).decode()
    if verb == "cancel_all":
        order = Cancelled("Request was cancelled by a control request, with all others")
        return msgspec.json.encode({"cancelled": sum(ctx.interrupt(order) for ctx in contexts.live())}).decode()
    if verb not in VERBS:
        raise InvalidInput(f"control: expected one of {', '.join(VERBS)}, found {verb!r}")
    target = parameters.get("control_id")
    if not isinstance(target, str) or not target:
        raise InvalidInput(f"control_id: '{verb}' needs the id of a request")
    document = (
        await _status(target, contexts, archive) if verb == "status" else await _cancel(target, contexts, archive)
    )
    return msgspec.json.encode(document).decode()


async def _status(target: str, contexts: Contexts, archive: Archive) -> Summary:
    live = contexts.find_live(target)
    return await _ended(target, archive) if live is None else contexts.records.summary(live)


async def _cancel(target: str, contexts: Contexts, archive: Archive) -> dict[str, Any]:
    live = contexts.find_live(target)
    if live is not None:
        return {
            "id": live.id,
            "cancelled": live.interrupt(Cancelled("Request was cancelled by a control request")),
        }
    found = await _ended(target, archive)
    if found.status == "live":
        ended = await archive.cancel(found)
        return {"id": found.id, "cancelled": ended.status == "cancelled"}
    return {"id": found.id, "cancelled": False}


async def _ended(target: str, archive: Archive) -> Summary:
    found = await archive.find(target)
    if found is None:
        raise UnknownRequest(f"no request with id {target[:64]!r} is live or kept")
    return found
