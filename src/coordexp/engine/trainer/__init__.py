"""The trainer's side of rollouts by vLLM."""
