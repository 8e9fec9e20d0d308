"""How weights travel from the learner to an engine, what both ends share: stamps, buckets, the group, checksums,
the layout of a vLLM model, and the receiving end."""
