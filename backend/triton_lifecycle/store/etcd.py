"""Contexts in etcd, through its JSON gateway: one key a layer, ended by a lease; a batch is one transaction.

Why no client library: docs/decisions/0017-etcd-through-its-gateway.md.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import aiohttp

from triton_lifecycle.errors import StoreError
from triton_lifecycle.store import LAYERS, OPERATION_LIMIT_S, Entry

MAX_OPERATIONS: Final = 120
"""Puts in one transaction; etcd takes 128 unless told otherwise."""
CONNECTIONS: Final = 8
LEAST_TTL_S: Final = 2.0
"""etcd grants no shorter lease."""


class EtcdStore:
    """An etcd of version 3.4 or later.

    A lease costs etcd more than a key, so keys that end within an eighth of their time of each other share one: a
    layer lives as long as it should, and up to a quarter longer.

    Args:
        url: ``http://`` or ``https://``, with ``user:password@`` where etcd asks for it.
        namespace: the prefix of every key.
        ttls: seconds by layer.

    """

    def __init__(self, url: str, namespace: str, ttls: Mapping[str, float]) -> None:
        parts = urlsplit(url)
        address = parts.netloc.rpartition("@")[2]
        self.name = f"etcd at {address}"
        self._base = f"{parts.scheme}://{address}/v3/"
        self._user = unquote(parts.username or ""), unquote(parts.password or "")
        self._token: str | None = None
        self._prefix = f"{namespace}/"
        self._ttls = ttls
        self._longest = max(ttls.values())
        self._leases: dict[tuple[int, float], tuple[str, float]] = {}
        self._session: aiohttp.ClientSession | None = None

    async def write(self, entries: Sequence[Entry]) -> None:
        """Put down layers; etcd lets them expire with their leases."""
        puts: dict[str, tuple[bytes, float]] = {}
        for entry in entries:
            for layer, value, left in entry.living(self._ttls):
                puts[self._key(entry.id, layer)] = (value, left)
            if entry.caller_id and entry.age < self._longest:
                puts[self._caller(entry.caller_id)] = (entry.id.encode(), self._longest - entry.age)
        await self._put(puts)

    async def read(self, request_id: str) -> Mapping[str, bytes]:
        """Return the layers that are there of a request."""
        found = await self._get([self._key(request_id, layer) for layer in LAYERS])
        return {layer: value for layer, value in zip(LAYERS, found, strict=True) if value is not None}

    async def resolve(self, caller_id: str) -> str | None:
        """Return our id of the request that last used the caller's id."""
        return await self._text(self._caller(caller_id))

    async def set_marks(self, marks: Mapping[str, str], ttl: float) -> None:
        """Put down small texts by name."""
        await self._put({f"{self._prefix}mark/{name}": (text.encode(), ttl) for name, text in marks.items()})

    async def mark(self, name: str) -> str | None:
        """Return the text put down under a name, while it lives."""
        return await self._text(f"{self._prefix}mark/{name}")

    async def aclose(self) -> None:
        """Close the connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _key(self, request_id: str, layer: str) -> str:
        return f"{self._prefix}context/{request_id}/{layer}"

    def _caller(self, caller_id: str) -> str:
        return f"{self._prefix}caller/{caller_id}"

    async def _text(self, key: str) -> str | None:
        value = (await self._get([key]))[0]
        return None if value is None else value.decode()

    async def _put(self, puts: Mapping[str, tuple[bytes, float]]) -> None:
        operations = [
            {"requestPut": {"key": _b64(key.encode()), "value": _b64(value), "lease": await self._lease(ttl)}}
            for key, (value, ttl) in puts.items()
        ]
        for at in range(0, len(operations), MAX_OPERATIONS):
            await self._ask("kv/txn", {"success": operations[at : at + MAX_OPERATIONS]})

    async def _get(self, keys: Sequence[str]) -> list[bytes | None]:
        operations = [{"requestRange": {"key": _b64(key.encode())}} for key in keys]
        answer = await self._ask("kv/txn", {"success": operations})
        ranges = [response.get("response_range", {}).get("kvs") for response in answer["responses"]]
        return [base64.b64decode(found[0].get("value", "")) if found else None for found in ranges]

    async def _lease(self, ttl: float) -> str:
        """Return a lease that lasts at least ``ttl`` seconds from now."""
        ttl = max(ttl, LEAST_TTL_S)
        step = 2.0 ** (math.floor(math.log2(ttl)) - 3)
        size = math.ceil(ttl / step)
        key = (size, step)
        lease, until = self._leases.get(key, ("", 0.0))
        now = time.monotonic()
        if now >= until:
            # Shared for one step: what is bound to it last still has all of its time.
            granted = await self._ask("lease/grant", {"TTL": str(math.ceil(size * step + step))})
            lease = granted["ID"]
            self._leases = {old: value for old, value in self._leases.items() if value[1] > now}
            self._leases[key] = (lease, now + step)
        return lease

    async def _ask(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        try:
            async with asyncio.timeout(OPERATION_LIMIT_S):
                if self._user[0] and self._token is None:
                    name, password = self._user
                    self._token = (await self._post("auth/authenticate", {"name": name, "password": password}))["token"]
                return await self._post(path, body)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            # It may have come back without what it knew of us; the next try asks anew.
            self._leases.clear()
            self._token = None
            status = getattr(error, "status", None)
            reason = f"HTTP {status}" if status else type(error).__name__
            raise StoreError(f"{self.name} does not answer ({reason})") from error

    async def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=CONNECTIONS))
        headers = {"Authorization": self._token} if self._token else {}
        async with self._session.post(self._base + path, json=body, headers=headers, raise_for_status=True) as answer:
            document: dict[str, Any] = json.loads(await answer.read())
            return document


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode()
