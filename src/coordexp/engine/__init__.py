"""Everything about vLLM, in one package for each kind of process that runs it:

* ``trainer``: backends, the client of rollout servers, weight pushes, the engine in the trainer's own process
* ``server``: ``coordexp serve`` and ``swift rollout``
* ``worker``: vLLM's engine and worker processes, which load the extension, logits processors and drafts by name
* ``wire``: shared by them: payloads, engine arguments, environment variables
"""
