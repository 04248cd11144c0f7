"""A simulated engine: no model and no GPU, but vLLM's order of events, its limits, and faults on demand.

One request through it: ``engine.generate`` makes a ``Sequence`` per answer, ``scheduler`` gives it a slot and KV
blocks, ``sequence`` makes its tokens out of the ``language``, and whoever reads the generator takes what is new.
"""

from triton_lifecycle.engine.simulated.engine import SimulatedEngine
from triton_lifecycle.engine.simulated.settings import Fault, SimulatedSettings, When

__all__ = ["Fault", "SimulatedEngine", "SimulatedSettings", "When"]
