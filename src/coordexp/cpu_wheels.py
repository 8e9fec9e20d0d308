"""PyPI's CUDA builds beside a torch without CUDA: make them work, or take them away.

torchvision: PyPI carries it only as a CUDA build, whose native library cannot load beside a CPU torch; `import
torchvision` then fails on a missing operator although nothing here needs that operator's kernel. Its two operators are
defined so that its Python code can register against them.

torchaudio, torchcodec: vLLM's CPU build brings them along as CUDA builds too. transformers and vLLM use them when they
are installed, and break when they do not load; nothing here needs them, and vLLM does without. They are uninstalled.

``python -m coordexp.cpu_wheels --install`` does both for an environment, for every process in it, those that other
programs start included (vLLM's and swift's workers): a ``.pth`` file imports a small hook at start-up, which waits for
torchvision to be imported and imports nothing before. On CUDA machines, and with real CPU builds, it does nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import sysconfig
from pathlib import Path

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_library = None  # torch.library drops definitions when their Library object dies

HOOK_MODULE = "_coordexp_torchvision_hook"
_HOOK_SOURCE = '''"""Written by `python -m coordexp.cpu_wheels --install`; see that module. Delete freely."""

import sys
from importlib.machinery import PathFinder


class _Finder:
    """Prepares torchvision's import at the moment its code runs, not when somebody merely looks whether it exists."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "torchvision":
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None or not hasattr(spec.loader, "exec_module"):
            return spec
        run = spec.loader.exec_module

        def exec_module(module):
            try:
                from coordexp.cpu_wheels import ensure_torchvision
            except ModuleNotFoundError as error:
                if error.name not in ("coordexp", "coordexp.cpu_wheels", "torch"):
                    raise
            else:  # without the project in this environment, torchvision is left as it is
                ensure_torchvision()
            run(module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Finder)
'''


def ensure_torchvision() -> None:
    """Make ``import torchvision`` work in this process. Call before anything imports torchvision."""
    global _library
    import torch

    # The package's own name stands in sys.modules already while its code starts, so look for its first submodule.
    if torch.version.cuda is not None or "torchvision.extension" in sys.modules or _library is not None:
        return
    if _native_library_loads():
        return
    library = torch.library.Library("torchvision", "DEF")
    for schema in _SCHEMAS:
        library.define(schema)
    _library = library


def _native_library_loads() -> bool:
    import torch

    spec = importlib.util.find_spec("torchvision") if "torchvision" not in sys.modules else None
    origin = spec.origin if spec is not None else getattr(sys.modules.get("torchvision"), "__file__", None)
    if origin is None:
        return True  # not installed: nothing to help
    for candidate in Path(origin).parent.glob("_C*.so"):
        try:
            torch.ops.load_library(str(candidate))
        except OSError:
            return False
        return True
    return False


def install_hook(site_packages: Path) -> None:
    """Write the hook and the ``.pth`` file that imports it into a site-packages folder; overwrites older ones."""
    (site_packages / f"{HOOK_MODULE}.py").write_text(_HOOK_SOURCE, encoding="utf-8")
    (site_packages / f"{HOOK_MODULE}.pth").write_text(f"import {HOOK_MODULE}\n", encoding="utf-8")


def unloadable(packages: tuple[str, ...] = ("torchaudio", "torchcodec")) -> list[str]:
    """Those of ``packages`` that are installed and whose import fails on a native library."""
    found = []
    for package in packages:
        if importlib.util.find_spec(package) is None:
            continue
        # In a process of its own: a half-loaded native library stays in the one that tried.
        attempt = subprocess.run(
            [sys.executable, "-c", f"import {package}"], capture_output=True, text=True, timeout=300
        )
        if attempt.returncode and "load" in attempt.stderr and ".so" in attempt.stderr:
            found.append(package)
    return found


def main(arguments: list[str] | None = None) -> int:
    """The command line of this module."""
    parser = argparse.ArgumentParser(prog="python -m coordexp.cpu_wheels", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--install", action="store_true", help="write the hook and uninstall what cannot load, where that is needed"
    )
    if not parser.parse_args(arguments).install:
        parser.print_help()
        return 0
    import torch

    if torch.version.cuda is not None:
        print("torch has CUDA: torchvision needs no help")
        return 0
    if _native_library_loads():
        print("torchvision's native library loads: it needs no help")
    else:
        site_packages = Path(sysconfig.get_path("purelib"))
        install_hook(site_packages)
        print(f"torch without CUDA: torchvision's import is prepared in every process of {sys.prefix}")
    for package in unloadable():
        subprocess.run([sys.executable, "-m", "pip", "uninstall", "--quiet", "--yes", package], check=True, timeout=300)
        print(f"torch without CUDA: uninstalled {package}, a CUDA build that cannot load; vLLM works without it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
