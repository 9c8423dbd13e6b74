"""Makes .venv and installs the pinned list into it. Needs nothing but Python 3.11 and pip.

    python3.11 requirements/install.py            # the list for this machine
    python3.11 requirements/install.py --list cpu # a list by name

The CUDA list is taken where an NVIDIA driver is there, the CPU list elsewhere. A stamp inside .venv says which
list is installed; where it matches, this returns at once. An interrupted run leaves no stamp, so the next one
finishes the work. Two runs at the same time wait for each other.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
STAMP = VENV / "installed.sha256"
# Where PyTorch publishes its CPU builds; PyPI has only the CUDA one. Asked only if no configured index has them.
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def driver_present() -> bool:
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def fingerprint(requirements: Path) -> str:
    digest = hashlib.sha256(requirements.read_bytes())
    digest.update((ROOT / "pyproject.toml").read_bytes())
    digest.update(f"{sys.version} {VENV}".encode())
    return digest.hexdigest()


def venv_works() -> bool:
    if not VENV_PYTHON.exists():
        return False
    return subprocess.run([VENV_PYTHON, "-m", "pip", "--version"], capture_output=True).returncode == 0


def pip_install(*arguments: str) -> int:
    command = [VENV_PYTHON, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-deps"]
    return subprocess.run([*command, *arguments]).returncode


def install(name: str) -> None:
    requirements = ROOT / "requirements" / f"{name}.txt"
    wanted = fingerprint(requirements)
    if STAMP.exists() and STAMP.read_text() == wanted and VENV_PYTHON.exists():
        return
    print(f"Setting up .venv from requirements/{name}.txt (once, a minute or two) ...", flush=True)
    STAMP.unlink(missing_ok=True)
    if not venv_works():
        subprocess.run([sys.executable, "-m", "venv", "--clear", VENV], check=True)
    torch = next(line for line in requirements.read_text().splitlines() if line.startswith("torch=="))
    if pip_install(torch) != 0 and (name != "cpu" or pip_install(torch, "--index-url", TORCH_CPU_INDEX) != 0):
        sys.exit(f"Set-up failed: pip could not install {torch}. The lines above say why; then run this again.")
    if pip_install("-r", str(requirements)) != 0:
        sys.exit("Set-up failed: pip could not install the list. The lines above say why; then run this again.")
    if pip_install("--no-build-isolation", "-e", str(ROOT)) != 0:
        sys.exit("Set-up failed: pip could not install recsys_offload itself. The lines above say why.")
    temporary = STAMP.with_suffix(".tmp")
    temporary.write_text(wanted)
    temporary.replace(STAMP)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", choices=["cpu", "cuda"], help="which list; by default, by the driver")
    name = parser.parse_args().list or ("cuda" if driver_present() else "cpu")
    if sys.version_info < (3, 11):  # noqa: UP036 - whoever runs this has not installed the project yet
        sys.exit(f"recsys_offload needs Python 3.11 or newer; this is {sys.version.split()[0]}")
    with (ROOT / ".setup.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            install(name)
        except KeyboardInterrupt:
            sys.exit("Set-up interrupted; the next run goes on from here.")


if __name__ == "__main__":
    main()
