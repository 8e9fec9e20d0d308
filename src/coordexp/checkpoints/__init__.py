"""A checkpoint's folder, read without its weights and without torch."""
