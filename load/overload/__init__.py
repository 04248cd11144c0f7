"""Three times more callers than the engine can serve: does it serve as many as before, and what do the others hear?

``python -m load.overload`` measures the capacity of a simulated engine, then sends it Poisson loads, one after the
other, from callers that have ten seconds and follow our client's retry policy; last the highest load once more with all
limits off. The whole pipeline runs, without Triton, in virtual time; with ``--real`` in real time. ``--triton`` sends
the loads to a real tritonserver over gRPC, one server for each; its engine is slower, so that the machine is not the
limit.

*Goodput*: complete answers within the caller's own ten seconds, a second. *Error of a hint*: against the time in which
as many places came free as the caller needed, counting those before it that were told to come back and did.
"""
