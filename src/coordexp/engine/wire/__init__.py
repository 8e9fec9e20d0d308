"""What trainer, servers and workers share; imports neither torch nor vLLM."""
