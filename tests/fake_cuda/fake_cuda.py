"""CUDA tensors without memory, on torch's CPU wheel: import this module before torch.

torch's ``FakeTensorMode`` computes shapes, types and devices, but no values. On a CPU wheel it fails at the first
backward pass, because a CUDA guard is missing. ``hooks.cpp`` registers one (two seconds of g++, kept in the temporary
folder).
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("hooks.cpp")


def load_hooks() -> None:
    """Compile and load the hooks; nothing to do in a CUDA build."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None and "torch" not in sys.modules, "import fake_cuda before torch"
    torch = Path(spec.origin).parent
    if (torch / "lib" / "libtorch_cuda.so").exists():
        return
    # The library is linked to the torch in this folder, which another checkout may remove.
    built_from = b"\0".join([SOURCE.read_bytes(), importlib.metadata.version("torch").encode(), bytes(torch)])
    name = f"coordexp-fake-cuda-{os.getuid()}-{hashlib.sha256(built_from).hexdigest()[:16]}.so"
    library = Path(tempfile.gettempdir()) / name
    if not library.exists():
        includes = [f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include"]
        libraries = [f"-L{torch}/lib", f"-Wl,-rpath,{torch}/lib", "-lc10", "-ltorch_cpu"]
        partial = library.with_suffix(f".{os.getpid()}")
        command = [
            "g++",
            "-O1",
            "-std=c++20",
            "-shared",
            "-fPIC",
            *includes,
            str(SOURCE),
            *libraries,
            "-o",
            str(partial),
        ]
        subprocess.run(command, check=True)
        partial.replace(library)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


load_hooks()

import torch  # noqa: E402
import torch.cuda.amp.common  # noqa: E402

if not torch.cuda.is_available():
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    torch.cuda.is_bf16_supported = lambda *_, **__: True
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.cuda.current_device = lambda: 0
    torch.cuda._lazy_init = lambda: None
