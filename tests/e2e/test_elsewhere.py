"""The quickstart under unusual conditions: a checkout in a directory with a blank, and a user who is not root."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import ROOT

NOBODY = 65534
AS_NOBODY: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}


@pytest.fixture
def home() -> Iterator[Path]:
    """A home of the user's own; not pytest's, which lies below one that is closed to others."""
    directory = Path(tempfile.mkdtemp(prefix="mslime-elsewhere-"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)


def python() -> str:
    """One that the user may run, which a Python below /root is not."""
    for candidate in ("python3.11", "python3.12", "/usr/bin/python3.11", "/usr/bin/python3.12"):
        program = [candidate, "-c", "import ensurepip, venv, sys; print(sys.executable)"]
        try:
            found = subprocess.run(program, check=True, capture_output=True, text=True, **AS_NOBODY)
        except (OSError, subprocess.CalledProcessError):
            continue
        return found.stdout.strip()
    pytest.fail("no Python 3.11 or 3.12 that another user can run: install one with its venv in /usr/bin")


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_the_quickstart_learns_in_a_directory_with_a_blank_for_a_user_who_is_not_root(home: Path) -> None:
    checkout = home / "my projects" / "mslime"
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in files.split("\0")[:-1]:
        target = checkout / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
    if AS_NOBODY:
        subprocess.run(["chown", "-R", f"{NOBODY}:{NOBODY}", str(home)], check=True)
    kept = {
        name: value for name, value in os.environ.items() if name.upper().startswith("PIP_") or "PROXY" in name.upper()
    }
    paths = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(home), "TMPDIR": str(home), "PYTHON": python()}
    log = home / "quickstart.log"
    with log.open("w") as output:
        command = ["bash", "scripts/quickstart.sh", "--", "--train.num-steps", "4"]
        where: dict[str, Any] = {"cwd": checkout, "env": {**kept, **paths}}
        status = subprocess.run(
            command, check=False, stdout=output, stderr=subprocess.STDOUT, **where, **AS_NOBODY
        ).returncode
    assert status == 0, log.read_text()[-5000:]
    assert (checkout / "outputs" / "quickstart" / "rl" / "report.html").stat().st_size > 0
