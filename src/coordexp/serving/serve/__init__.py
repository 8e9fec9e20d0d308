"""``coordexp serve``: the HTTP application, its service, the engines behind it and the lock of their weights."""
