"""Users of every kind at a steady load for a long time: does anything grow, does anything fail?

``python -m load.soak --minutes 60`` starts a real tritonserver, measures what it can carry, and asks for a steady share
of that. Most callers want an answer; some cancel, allow too little time, read slowly or send rubbish, and each must end
as such a caller must. Every few seconds it looks at what the server's processes hold. After the warm-up no memory may
grow, and at the end everything must have come back.
"""
