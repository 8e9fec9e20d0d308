"""Imported last by fork servers: garbage collections of their children pass over the modules, which they share."""

import gc

gc.collect()
gc.freeze()
