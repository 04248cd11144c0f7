"""Metrics on Triton's own ``/metrics`` page.

``catalogue`` says what there is; ``follow`` follows each request on the bus for ``requests`` (ours and OpenTelemetry's
names) and ``official`` (the official backend's); ``server`` reads what is counted elsewhere; ``page`` gathers all of
it, and ``reporter`` has it written once a second. docs/metrics.md explains every metric.
"""

from triton_lifecycle.metrics.follow import Follow
from triton_lifecycle.metrics.official import OfficialMetrics
from triton_lifecycle.metrics.page import Page
from triton_lifecycle.metrics.reporter import Reporter
from triton_lifecycle.metrics.requests import RequestMetrics
from triton_lifecycle.metrics.server import Parts, ServerMetrics

__all__ = ["Follow", "OfficialMetrics", "Page", "Parts", "Reporter", "RequestMetrics", "ServerMetrics"]
