"""Takes ten minutes to import, and says by a file that it has begun."""

import os
import time
from pathlib import Path

Path(os.environ["IMPORT_BEGAN"]).touch()
time.sleep(600)
