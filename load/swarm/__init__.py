"""Locust's users, and the process that does their requests; see docs/load.md.

Greenlets decide what is asked and count what came of it; a process of its own beside each of them (``driver``) asks
and measures, on an event loop that gevent never touches. ``link`` joins the two.
"""
