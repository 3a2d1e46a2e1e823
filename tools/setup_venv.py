"""Make .venv ready: reuse a Python that already has torch >= 2.11, install what is missing, do nothing when all is there.

Standard library only, run by any Python >= 3.11 (`make` calls it before everything else).
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
REQUIREMENTS = ROOT / "requirements.txt"
MINIMUM_TORCH = (2, 11)
CORE = ("torch", "numpy")  # without these nothing works; a node without a network may lack the others
# Runs inside a Python and prints the requirement lines that it does not meet (name and lower bound; torch: the range that works).
LIST_MISSING = """
import sys
from importlib.metadata import PackageNotFoundError, version
def numbers(text):
    return [int(part) for part in text.split("+")[0].split(".") if part.isdigit()]
for line in sys.argv[1:]:
    name, _, bound = line.replace("==", ">=").partition(">=")
    bound = "2.11" if name == "torch" else bound
    try:
        if numbers(version(name)) < numbers(bound):
            print(line)
    except PackageNotFoundError:
        print(line)
"""


def requirement_lines() -> list[str]:
    """The requirements that hold on this platform, without their markers."""
    lines = [line.strip() for line in REQUIREMENTS.read_text().splitlines() if line.strip() and not line.startswith("#")]
    named = [line.partition(";") for line in lines]
    return [line.strip() for line, _, marker in named if not marker or sys.platform in marker]


def missing_from(python: str, lines: list[str]) -> list[str]:
    """The lines of `lines` that `python` does not meet."""
    return subprocess.run([python, "-c", LIST_MISSING, *lines], capture_output=True, text=True, check=True).stdout.split()


def has_torch(python: str) -> bool:
    code = "import importlib.metadata as m; print(m.version('torch'))"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.strip()
    match = re.match(r"(\d+)\.(\d+)", found)
    return match is not None and (int(match[1]), int(match[2])) >= MINIMUM_TORCH


def create_venv(reuse_packages: bool) -> None:
    """A new .venv, made under another name first: an interrupted run leaves no half of one."""
    print(f"setup: creating .venv{' on top of the torch that this Python has' if reuse_packages else ''}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", *(["--system-site-packages"] if reuse_packages else []), str(VENV)], check=True)
    if reuse_packages and sys.prefix != sys.base_prefix:
        # `sys.executable` is itself a virtual environment: --system-site-packages shows the base's packages, not its own.
        site = next(path for path in sys.path if path.startswith(sys.prefix) and path.endswith("-packages"))
        target = next((VENV / "lib").glob("python3*")) / "site-packages" / "outer_environment.pth"
        target.write_text(site + "\n")


def main() -> int:
    if sys.version_info < (3, 11):  # noqa: UP036 - this file is run by whatever python3 is on the PATH
        sys.exit(f"setup: Python {sys.version.split()[0]} is too old: 3.11 or later is needed (python3 on your PATH)")
    stamp = VENV / ".requirements-met"
    wanted = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()
    if stamp.exists() and stamp.read_text() == wanted:
        return 0
    python = VENV / "bin" / "python"
    if VENV.exists() and not python.exists():
        shutil.rmtree(VENV)
    if not VENV.exists():
        create_venv(reuse_packages=has_torch(sys.executable))
    missing = missing_from(str(python), requirement_lines())
    if missing:
        print(f"setup: installing {' '.join(missing)}", flush=True)
        environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        done = subprocess.run([str(python), "-m", "pip", "install", "-q", *missing], env=environment)
        if done.returncode:
            missing = missing_from(str(python), missing)
            if any(line.startswith(CORE) for line in missing):
                sys.exit(f"setup: pip could not install {' '.join(missing)} (its message stands above); mend that and try again")
            print(f"setup: going on without {' '.join(missing)}: what needs one of them will say so", flush=True)
            return 0  # no stamp: the next run tries again
    stamp.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
