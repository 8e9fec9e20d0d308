"""Reading and converting data needs neither torch nor transformers."""

from __future__ import annotations

import subprocess
import sys


def test_the_reader_and_the_converters_import_with_torch_blocked() -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'torchvision', 'transformers', 'vllm'):\n"
        "    sys.modules[name] = None\n"
        "import coordexp.data, coordexp.data.jsonl, coordexp.data.convert, coordexp.data.jsonl\n"
        "print(coordexp.data.read_jsonl.__name__, coordexp.data.convert.convert_voc.__name__)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["read_jsonl", "convert_voc"]
