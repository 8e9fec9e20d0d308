"""Shared by both ends of a weight push: versions, buckets, checksums, the weight group and its rendezvous, the layout
of a vLLM model; and the receiving end."""
