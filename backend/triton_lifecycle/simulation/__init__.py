"""Requests in virtual time: the real pipeline on a clock that nobody waits for.

``virtual_time`` is the event loop, ``trace`` what a recorded request brings along, ``engine`` a simulated engine that
keeps its pace, ``run`` the whole.
"""
