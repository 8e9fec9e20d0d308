"""Inside vLLM's engine and worker processes, which import these modules by name."""
