"""How weights travel from the learner to an engine, what both ends share: stamps, buckets, the group, checksums,
the layout of a vLLM model, and the receiving end.

By hand, although vLLM ships ``distributed/weight_transfer``: its engines have no way between CPUs, where learner and
server must meet too; they set no deadline, they do not say which names never arrived or landed elsewhere, and the one
for a single machine takes pickles from the wire. What is asked of a push here (every name both ways, a checksum of what
the engine holds, a stamp in every answer) would have to be built around them, and carrying the bytes is the small part:
``group.py``."""
