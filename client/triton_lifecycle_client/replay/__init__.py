"""Recorded requests, asked again: of a server (``server``) or of the simulation, and compared (``compare``)."""
