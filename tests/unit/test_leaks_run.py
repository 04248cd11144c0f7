"""The short form of ``python -m load.leaks``: nothing is left of 3,000 requests of every fate, and every count agrees.

Memory is judged by the long form alone: here less comes together than a server keeps on purpose.
"""

from __future__ import annotations

from load import leaks

from triton_lifecycle.events import ENDINGS


def test_nothing_is_left_of_requests_of_every_fate():
    """Whatever becomes of requests and engine, no account stays open, and received is the sum of the endings."""
    report = leaks.Run(3000, seed=1, concurrency=128, say=lambda _: None, rounds=2, stops=3).run()
    assert report.problems == []
    totals = {name: sum(row.counts.get(name, 0) for row in report.rows) for name in ("received", *ENDINGS.values())}
    assert totals["received"] == 3000 == sum(totals[name] for name in ENDINGS.values())
    assert all(totals.values()), "every ending came up"
    assert not any(row.left for row in report.rows)


def test_what_is_left_is_a_problem(monkeypatch):
    """The run would notice: with a permit that is never given back it fails and names it."""
    from triton_lifecycle.admission import Admission

    monkeypatch.setattr(leaks, "IDLE_S", 1.0)
    release, calls = Admission.release, []

    def forgets_one(self, *arguments, **named):
        calls.append(1)
        return None if len(calls) == 5 else release(self, *arguments, **named)

    monkeypatch.setattr(Admission, "release", forgets_one)
    report = leaks.Run(60, seed=1, concurrency=8, say=lambda _: None, rounds=1, stops=1).run()
    assert any("'permits': 1" in problem for problem in report.problems)
