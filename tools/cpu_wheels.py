"""Sets up an environment whose torch has no CUDA: PyPI's CUDA builds are made to work there, or taken away.

torchvision: ``coordexp.cpu_wheels`` prepares its import in this project's processes. For those that other programs
start (vLLM's and swift's workers) a ``.pth`` file imports a small hook at start-up, which waits for torchvision to be
imported and imports nothing before.

torchaudio, torchcodec: vLLM's CPU build brings them along as CUDA builds too. transformers and vLLM use them when they
are installed, and break when they do not load; nothing here needs them, and vLLM does without. They are uninstalled.

``python tools/cpu_wheels.py --install`` does both for the environment that it runs in; `make setup` calls it. On CUDA
machines, and with real CPU builds, it does nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import sysconfig
from pathlib import Path

from coordexp.cpu_wheels import native_library_loads

HOOK_MODULE = "_coordexp_torchvision_hook"
_HOOK_SOURCE = '''"""Written by tools/cpu_wheels.py of coordexp, which says why. Delete freely."""

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
    """The command line of this tool."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
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
    if native_library_loads():
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
