"""Triton's ``/metrics`` page, as few calls as possible: values are gathered here and written now and then.

Each call of Triton's metric objects is a blocking round trip to the server (13 to 25 µs). So the event loop only adds
numbers to objects of ours; once a second :meth:`Page.collect` takes what has changed, and a thread writes it with
:meth:`Page.write`. Counters lose nothing, however long that takes. Triton's histograms take single values and nothing
else: of each series a uniform sample of at most :data:`SAMPLE` a second is written, what is left out is counted (see
decision 0028). Only histograms that are ``complete`` get every value, up to :data:`COMPLETE`.
"""

from __future__ import annotations

import ctypes
import logging
import random
import time
from typing import Any, Final

import msgspec

from triton_lifecycle.metrics.catalogue import FAMILIES, Family

log = logging.getLogger(__name__)

SAMPLE: Final = 16
"""Observations of one series that are written at once; of more, a uniform sample."""
COMPLETE: Final = 10_000
"""The same for those that get every one: more than a thread can write in a second."""
MAX_SERIES: Final = 1000
"""Series in all. The labels are bounded by themselves; this is the wall behind them."""
REFRESH: Final = 10
"""A gauge that has not changed is written again with every tenth collection: another instance of the model may have
written its last value to the series after ours."""

Labels = dict[str, str]


class Counter:
    """Only grows."""

    __slots__ = ("_seen", "_value", "_written")

    def __init__(self) -> None:
        self._value = self._written = self._seen = 0.0

    def add(self, amount: float = 1.0) -> None:
        """Count."""
        self._value += amount

    def reached(self, total: float) -> None:
        """Follow a count kept elsewhere, which begins anew at times."""
        self._value += total - self._seen if total >= self._seen else total
        self._seen = total

    def take(self) -> list[float]:
        """Return what is to be written."""
        grown, self._written = self._value - self._written, self._value
        return [grown] if grown else []


class Gauge:
    """Goes up and down."""

    __slots__ = ("_age", "_value", "_written")

    def __init__(self) -> None:
        self._value = 0.0
        self._written: float | None = None
        self._age = 0

    def set(self, value: float) -> None:
        """Put a value in the place of the one before."""
        self._value = value

    def take(self) -> list[float]:
        """Return what is to be written."""
        self._age += 1
        if self._value == self._written and self._age < REFRESH:
            return []
        self._written, self._age = self._value, 0
        return [self._value]


class Histogram:
    """Single values; of many, a uniform sample (reservoir sampling)."""

    __slots__ = ("_came", "_kept", "_most", "left_out")

    def __init__(self, most: int) -> None:
        self._most = most
        self._came = 0
        self._kept: list[float] = []
        self.left_out = 0
        """Values that were not kept since the last :meth:`take`."""

    def observe(self, value: float) -> None:
        """Take in a value."""
        self._came += 1
        if len(self._kept) < self._most:
            self._kept.append(value)
            return
        self.left_out += 1
        place = random.randrange(self._came)  # noqa: S311 - a sample
        if place < self._most:
            self._kept[place] = value

    def take(self) -> list[float]:
        """Return what is to be written."""
        kept, self._kept, self._came, self.left_out = self._kept, [], 0, 0
        return kept


class Series(msgspec.Struct):
    """One line of the page, or the lines of one histogram."""

    family: Family
    labels: Labels
    values: Counter | Gauge | Histogram
    metric: Any = None
    """Triton's object; made by the first write."""


Batch = list[tuple[Series, list[float]]]


class Page:
    """The series of one model instance.

    :meth:`counter`, :meth:`gauge`, :meth:`histogram` and :meth:`collect` belong to the event loop, :meth:`write` to one
    thread.

    Args:
        pb: the module ``triton_python_backend_utils``.
        model: the model's name.
        version: its version.
        instance: the instance's name, unlike that of any other.

    """

    def __init__(self, pb: Any, model: str, version: str, instance: str) -> None:  # noqa: ANN401 - exists only in Triton
        self._pb = pb
        self._labels = {"model": model, "version": version}
        self._instance = instance
        self._series: dict[tuple[str, ...], Series] = {}
        self._families: dict[str, Any] = {}
        self._full = False
        self._failed = False
        self._sampled_out: Counter = self.counter("lifecycle_metrics_sampled_out_total")
        self._spent: Counter = self.counter("lifecycle_metrics_write_seconds_total")

    def counter(self, name: str, **labels: str) -> Counter:
        """Return a counter of the catalogue; the same for the same labels."""
        found = self._find(name, labels, Counter)
        assert isinstance(found, Counter)  # noqa: S101 - the catalogue says so
        return found

    def gauge(self, name: str, **labels: str) -> Gauge:
        """Return a gauge of the catalogue."""
        found = self._find(name, labels | {"model_instance": self._instance}, Gauge)
        assert isinstance(found, Gauge)  # noqa: S101 - the catalogue says so
        return found

    def histogram(self, name: str, buckets: tuple[float, ...] = (), **labels: str) -> Histogram:
        """Return a histogram of the catalogue, with bounds of its own where the catalogue has none."""
        most = COMPLETE if FAMILIES[name].complete else SAMPLE
        found = self._find(name, labels, lambda: Histogram(most), buckets)
        assert isinstance(found, Histogram)  # noqa: S101 - the catalogue says so
        return found

    def _find(self, name: str, labels: Labels, make: Any, buckets: tuple[float, ...] = ()) -> Any:  # noqa: ANN401
        key = (name, *labels.values())
        series = self._series.get(key)
        if series is None:
            family = FAMILIES[name]
            if buckets:
                family = msgspec.structs.replace(family, buckets=buckets)
            series = Series(family, self._labels | labels, make())
            if set(series.labels) != set(family.all_labels):
                raise ValueError(f"{name} has the labels {family.all_labels}, not {tuple(series.labels)}")
            if len(self._series) < MAX_SERIES:
                self._series[key] = series
            elif not self._full:
                self._full = True
                log.error("%d metric series exist; further ones are not shown, such as %s%s", MAX_SERIES, name, labels)
        return series.values

    def collect(self) -> Batch:
        """Return what has changed since the last call, and what is not on the page yet."""
        for series in self._series.values():
            if isinstance(series.values, Histogram) and series.values.left_out:
                self._sampled_out.add(series.values.left_out)
        batch = []
        for series in self._series.values():
            values = series.values.take()
            if values or series.metric is None:
                batch.append((series, values))
        return batch

    def write(self, batch: Batch) -> None:
        """Write to Triton; takes some 20 µs for each value. Never raises."""
        began = time.thread_time()
        for series, values in batch:
            try:
                self._write(series, values)
            except Exception:
                # The same reason will hold for the others and for the next time.
                if not self._failed:
                    self._failed = True
                    log.exception("%s could not be written to Triton's metrics", series.family.name)
        self._spent.add(time.thread_time() - began)

    def _write(self, series: Series, values: list[float]) -> None:
        if series.metric is None:
            series.metric = self._create(series)
        kind, metric = series.family.kind, series.metric
        write = {"counter": metric.increment, "gauge": getattr(metric, "set", None), "histogram": metric.observe}[kind]
        for value in values:
            write(value)

    def _create(self, series: Series) -> Any:  # noqa: ANN401 - Triton's
        known = series.family
        family = self._families.get(known.name)
        if family is None:
            kind = getattr(self._pb.MetricFamily, known.kind.upper())
            family = self._pb.MetricFamily(name=known.name, description=known.about, kind=kind)
            self._families[known.name] = family
            _keep_for_ever(family)
        if known.kind == "histogram":
            metric = family.Metric(labels=series.labels, buckets=list(known.buckets))
        else:
            metric = family.Metric(labels=series.labels)
        _keep_for_ever(metric)
        return metric


def _keep_for_ever(thing: Any) -> None:  # noqa: ANN401
    """See to it that Triton's object is never deleted, not even when the interpreter ends.

    When a model is reloaded, its next instance writes to the same series before the old one has gone. Triton 2.51 then
    deletes the series under it, and crashes now and then if its page is read meanwhile. A few bytes a load stay.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
