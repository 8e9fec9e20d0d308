"""What runs inside vLLM's own processes: CPU support, the weight group, the worker extension, the repeat guard.

Nothing here is imported by a learner that generates with transformers, and vLLM itself only where it is touched.
"""
