"""How long will a request take? Learned online, from what happened to others.

``features`` (what is known at admission) → ``rates`` (first token, time per token) and ``lengths`` (how many tokens) →
``online`` (the three predictions, with calibrated intervals). ``subscriber`` feeds it from the bus; ``state`` keeps
what was seen across restarts.
"""

from triton_lifecycle.timeouts.predictor.features import Features
from triton_lifecycle.timeouts.predictor.online import Interval, Observation, Online, Prediction
from triton_lifecycle.timeouts.predictor.subscriber import Predictor

__all__ = ["Features", "Interval", "Observation", "Online", "Prediction", "Predictor"]
