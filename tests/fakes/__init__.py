"""Stand-ins for what surrounds the backend; each behaves as the real thing was measured to."""
