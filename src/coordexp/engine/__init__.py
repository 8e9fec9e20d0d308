"""Everything about vLLM: engine arguments, the worker extension and its logits processors, the colocated engine, and
rollout servers with the client that the trainer talks to.

A trainer that generates with transformers imports nothing from here.
"""
