"""Addresses of other servers, and secrets. Whatever shows one shows it without its password, or not at all."""

from __future__ import annotations

import hmac
import re
from typing import Annotated, Any, ClassVar, Final, Self

from pydantic import AfterValidator, GetCoreSchemaHandler, PlainSerializer

HIDDEN: Final = "***"
MAX_TOKEN: Final = 512
_USER: Final = re.compile(r"(?<=://)[^/?#]*@")
_QUERY: Final = re.compile(r"(?i)((?:pass|secret|token|key|auth|cred)[^=&#]*=)[^&#]*")


class Url(str):
    """An address with a scheme. It is the whole text, but ``str()``, ``repr()`` and formatting leave the password out.

    Hand ``reveal()`` to the library that connects.
    """

    __slots__ = ()
    schemes: ClassVar[tuple[str, ...]] = ()

    def __str__(self) -> str:
        return masked(self.reveal())

    def __repr__(self) -> str:
        return repr(str(self))

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)

    def reveal(self) -> str:
        """Return the address as it was given, password and all."""
        return str.__str__(self)

    @classmethod
    def checked(cls, text: str) -> Self:
        """Return the address; raises ``ValueError`` without quoting it."""
        scheme, separator, rest = text.partition("://")
        if not separator or scheme not in cls.schemes or not rest:
            raise ValueError(f"must be an address beginning with {_listed(cls.schemes)}")
        return cls(text)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> Any:  # noqa: ANN401
        """Take texts, and write them out masked."""
        return handler.generate_schema(Annotated[str, AfterValidator(cls.checked), PlainSerializer(str)])


class RedisUrl(Url):
    """Of a Redis server: ``redis://[user:password@]host[:port][/database]``, ``rediss://`` with TLS, or ``unix://``."""

    __slots__ = ()
    schemes: ClassVar[tuple[str, ...]] = ("redis", "rediss", "unix")


class EtcdUrl(Url):
    """Of an etcd server: ``http://[user:password@]host[:port]``, or ``https://``."""

    __slots__ = ()
    schemes: ClassVar[tuple[str, ...]] = ("http", "https")


class OtlpUrl(Url):
    """Of a collector that takes OTLP: ``http://host[:port][/path]``, or ``https://``."""

    __slots__ = ()
    schemes: ClassVar[tuple[str, ...]] = ("http", "https")


class Token(Url):
    """A secret that callers must send; shown as ``***`` and nothing else."""

    __slots__ = ()
    MIN_LENGTH: ClassVar[int] = 16

    @classmethod
    def checked(cls, text: str) -> Self:
        """Return the token; raises ``ValueError`` without quoting it."""
        if not cls.MIN_LENGTH <= len(text) <= MAX_TOKEN or not text.isascii() or not text.isprintable():
            raise ValueError(f"must be {cls.MIN_LENGTH} to {MAX_TOKEN} printable ASCII characters")
        return cls(text)

    def __str__(self) -> str:
        return HIDDEN

    def matches(self, given: object) -> bool:
        """Whether somebody sent this token; takes as long for a wrong one as for the right one."""
        return isinstance(given, str) and hmac.compare_digest(given.encode(errors="replace"), self.reveal().encode())


def masked(text: str) -> str:
    """Return an address without user, password and what looks secret in its query; any other text is all hidden."""
    if "://" not in text:
        return HIDDEN
    return _QUERY.sub(rf"\1{HIDDEN}", _USER.sub(f"{HIDDEN}@", text))


def servers(text: str) -> str:
    """Return a list of servers as given; raises ``ValueError`` when it is not host:port, several with commas."""
    for server in text.split(","):
        host, _, port = server.strip().rpartition(":")
        if not host or "/" in server or "@" in server or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise ValueError("must be host:port, several with commas, such as kafka-1:9092,kafka-2:9092")
    return text


def _listed(schemes: tuple[str, ...]) -> str:
    *first, last = (f"{scheme}://" for scheme in schemes)
    return f"{', '.join(first)} or {last}" if first else last
