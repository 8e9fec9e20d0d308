"""Python imports this at its start if this folder is on PYTHONPATH."""

import traced

traced.start()
