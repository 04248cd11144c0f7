"""What holds for every test.

A run tries the same examples as the one before, so that what fails can be seen again and what has landed stays green;
``pytest --hypothesis-profile explore tests/property`` looks for new ones.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

_ALIKE = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""How long an example takes is a matter of the machine."""

settings.register_profile("repeatable", _ALIKE, derandomize=True)
settings.register_profile("explore", _ALIKE, max_examples=20_000, print_blob=True)
settings.load_profile("repeatable")
