"""From outcomes to Locust's series, and from its series to the report.

Only whole requests in earnest count into Locust's "Aggregated" line; first tokens, gaps, tokens/s, chaos and the tool's
own figures are series beside it. All are merged from the workers by Locust itself.
"""

from __future__ import annotations

from typing import Any, Final

from locust.stats import StatsError

from load.swarm.health import CPU_SERIES, LAG_SERIES, LATE_SERIES, LOCUST_SERIES, TOOL, Health
from load.swarm.protocol import UNEXPECTED, Beat, Outcome

END_TO_END: Final = "end to end"
FIRST: Final = "first token"
GAPS: Final = "between tokens"
SPEED: Final = "tokens/s of an answer (no ms)"
CHAOS: Final = "chaos"
NOT_SENT: Final = "not_sent"
DIED: Final = "driver_died"


class Failure(Exception):
    """How a request failed; its text, which Locust groups by, is the slug and nothing else."""

    def __repr__(self) -> str:
        return str(self)


class Series:
    """Writes into one process's statistics.

    Args:
        environment: Locust's.

    """

    def __init__(self, environment: Any) -> None:  # noqa: ANN401 - Locust is untyped here
        self._environment = environment

    @property
    def _stats(self) -> Any:  # noqa: ANN401 - a run may bring new ones
        return self._environment.stats

    def outcome(self, outcome: Outcome) -> None:
        """Count one request."""
        if outcome.late is not None:
            self._log(TOOL, LATE_SERIES, outcome.late)
        if outcome.deed != "ask":
            self._log(CHAOS, outcome.deed, outcome.total, outcome.size)
            if outcome.slug is not None:
                self.fail(CHAOS, outcome.deed, outcome.slug)
            return
        self._environment.events.request.fire(
            request_type=outcome.over,
            name=END_TO_END,
            response_time=outcome.total,
            response_length=outcome.size,
            exception=None if outcome.slug is None else Failure(outcome.slug),
            context={},
        )
        if outcome.first is not None:
            self._log(outcome.over, FIRST, outcome.first)
        for gap in outcome.gaps:
            self._log(outcome.over, GAPS, gap)
        if outcome.slug is None and outcome.total > 0:
            self._log(outcome.over, SPEED, outcome.tokens / outcome.total * 1e3, outcome.tokens)

    def beat(self, beat: Beat) -> None:
        """Count how the driver was."""
        for lag in beat.lags:
            self._log(TOOL, LAG_SERIES, lag)
        self._log(TOOL, CPU_SERIES, beat.cpu * 100)

    def greenlet_lag(self, lag_ms: float) -> None:
        """Count by how much a greenlet woke too late."""
        self._log(TOOL, LOCUST_SERIES, lag_ms)

    def fail(self, method: str, name: str, slug: str) -> None:
        """Count a failure that is none of Locust's "Aggregated"."""
        stats = self._stats
        stats.get(name, method).log_error(slug)
        key = StatsError.create_key(method, name, slug)
        if key not in stats.errors:
            stats.errors[key] = StatsError(method, name, slug)
        stats.errors[key].occurred()

    def _log(self, method: str, name: str, value: float, size: int = 0) -> None:
        self._stats.get(name, method).log(value, size)


def failures(stats: Any) -> dict[str, dict[str, int]]:  # noqa: ANN401
    """Return failures by series and slug."""
    found: dict[str, dict[str, int]] = {}
    for error in stats.errors.values():
        slugs = found.setdefault(f"{error.method} {error.name}", {})
        slug = str(error.error)
        slugs[slug] = slugs.get(slug, 0) + error.occurrences
    return found


def bad(stats: Any) -> int:  # noqa: ANN401
    """Return how many requests failed that should not have: those in earnest, and chaos that ended otherwise."""
    return sum(
        count
        for series, slugs in failures(stats).items()
        for slug, count in slugs.items()
        if not series.startswith((CHAOS, TOOL)) or slug.startswith(UNEXPECTED)
    )


def health(stats: Any) -> Health:  # noqa: ANN401
    """Return how the tool was."""

    def entry(name: str) -> Any:  # noqa: ANN401
        return stats.entries.get((name, TOOL))

    def high(name: str, share: float = 0.99) -> float:
        found = entry(name)
        return float(found.get_response_time_percentile(share)) if found is not None and found.num_requests else 0.0

    lag = entry(LAG_SERIES)
    told = failures(stats)
    return Health(
        lag_ms=high(LAG_SERIES),
        greenlet_ms=high(LOCUST_SERIES),
        late_ms=high(LATE_SERIES),
        cpu=high(CPU_SERIES, 0.5),
        dropped=told.get(f"{TOOL} {LATE_SERIES}", {}).get(NOT_SENT, 0),
        samples=0 if lag is None else lag.num_requests,
        deaths=told.get(f"{TOOL} {LAG_SERIES}", {}).get(DIED, 0),
    )


def report(stats: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return every series with its count, failures, mean and percentiles."""
    series = {}
    for (name, method), entry in sorted(stats.entries.items(), key=lambda item: item[0][::-1]):
        series[f"{method} {name}"] = {
            "count": entry.num_requests,
            "failures": entry.num_failures,
            "mean": round(entry.avg_response_time, 3),
            "max": round(entry.max_response_time, 3),
            **{f"p{share}": entry.get_response_time_percentile(share / 100) for share in (50, 90, 95, 99)},
        }
    seconds = max(1e-9, (stats.last_request_timestamp or 0) - stats.start_time)
    tokens = sum(entry.total_content_length for (name, _), entry in stats.entries.items() if name == SPEED)
    return {
        "requests": stats.total.num_requests,
        "requests_per_s": round(stats.total.num_requests / seconds, 3),
        "tokens": tokens,
        "tokens_per_s": round(tokens / seconds, 1),
        "series": series,
        "failures": failures(stats),
    }
