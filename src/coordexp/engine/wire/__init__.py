"""Shared by trainer, servers and workers; imports neither torch nor vLLM."""
