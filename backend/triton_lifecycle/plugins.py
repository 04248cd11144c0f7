"""From the name of a plug-in, ``module:attribute``, to the object."""

from __future__ import annotations

import importlib
from typing import Any

from triton_lifecycle.errors import ConfigError


def load_object(name: str, where: str) -> Any:  # noqa: ANN401 - a plug-in may be anything callable
    """Import ``module`` and return its ``attribute``.

    Args:
        name: ``module:attribute``.
        where: the configuration path that holds the name, for the error.

    Raises:
        ConfigError: the name has another form, or nothing is found under it.

    """
    module, colon, attribute = name.partition(":")
    if not colon or not module or not attribute:
        raise ConfigError(f"{where}: {name!r} is neither built in nor of the form 'module:attribute'")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{where}: cannot load {name!r}: {error}") from error
    if not callable(found):
        raise ConfigError(f"{where}: {name!r} is not callable")
    return found
