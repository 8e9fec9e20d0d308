"""A checkpoint's folder, read without its weights and without torch: what it is, its tokenizer, its sizes."""
