"""Time limits: what they are (``limits``), and the one movable deadline derived from them (``deadline``)."""
