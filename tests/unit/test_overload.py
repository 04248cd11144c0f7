"""What load.overload shows, in short."""

from __future__ import annotations

from load.overload.crowd import capacity, run
from load.overload.servers import LIMITS
from load.overload.verdict import judge

from triton_lifecycle.config import Admission
from triton_lifecycle.simulation import virtual_time


def test_three_times_the_capacity_costs_no_goodput():
    """With limits as many answers as at capacity, hints that are right; without them most of the work is wasted."""
    seconds = 20.0
    most = virtual_time.run(capacity, seconds)
    limited = [virtual_time.run(run, load, most, seconds, LIMITS) for load in (1.0, 3.0)]
    open_ = virtual_time.run(run, 3.0, most, seconds, Admission())
    judged = judge(limited)
    # How long a refusal takes is real time, and the benchmark's affair; here it may hit a pause of the machine.
    assert [met for name, (_, met) in judged.items() if not name.startswith("refusals")] == [True, True], judged
    assert limited[-1].refusals_ms
    assert limited[-1].wasted < 0.15
    assert open_.goodput < 0.85 * limited[-1].goodput
    assert open_.wasted > 0.3, "and the longer it lasts, the more"
