"""Where requests' time went: ``view`` chooses and counts, ``terminal``, ``chrome`` and ``page`` draw it."""
