"""Load on the server, and what it shows."""
