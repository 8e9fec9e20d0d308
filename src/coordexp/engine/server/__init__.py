"""Rollout servers: processes that answer HTTP requests."""
