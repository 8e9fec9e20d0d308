"""Runs as users start them, without torch."""
