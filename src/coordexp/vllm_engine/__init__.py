"""What is inside vLLM: the worker extension, logits processors, CPU support, and the engine in the learner's process.

Nothing here is imported by a learner that generates with transformers, and vLLM itself only where it is touched.
"""
