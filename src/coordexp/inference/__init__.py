"""A checkpoint that answers: the session, and ``coordexp evaluate``, ``predict`` and ``replay`` on top of it."""
