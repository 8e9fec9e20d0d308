"""``coordexp launch``: plan, preflight checks, and the supervisor that starts, watches and ends everything."""
