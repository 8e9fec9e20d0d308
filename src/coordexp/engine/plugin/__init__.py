"""The plugin for ``swift rollout``: it runs inside ms-swift's processes."""
