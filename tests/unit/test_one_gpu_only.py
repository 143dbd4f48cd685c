"""A library that keeps the code of one kind of GPU: what goes, what stays, and what is no fat binary."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "one_gpu_only.py"
MAGIC = struct.pack("<I", 0xBA55ED50)
PTX, MACHINE = 1, 2


def entry(kind: int, arch: int, code: bytes) -> bytes:
    header = bytearray(struct.pack("<HHIQ", kind, 0x101, 64, len(code)).ljust(64, b"\0"))
    struct.pack_into("<I", header, 28, arch)
    return bytes(header) + code


def fat(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return MAGIC + struct.pack("<HHQ", 1, 16, len(body)) + body


def run(tmp_path: Path, library: bytes, *more: str) -> tuple[subprocess.CompletedProcess[str], bytes | None]:
    source, output = tmp_path / "lib.so", tmp_path / "trimmed.so"
    source.write_bytes(library)
    done = subprocess.run([sys.executable, TOOL, source, output, *more], capture_output=True, text=True, check=False)
    return done, output.read_bytes() if output.exists() else None


def test_code_for_one_kind_stays_and_everything_else_is_zeros(tmp_path: Path) -> None:
    code = {arch: bytes([arch]) * 48 for arch in (80, 90, 100)}
    first = fat(entry(MACHINE, 80, code[80]), entry(MACHINE, 90, code[90]), entry(PTX, 90, b"ptx" * 16))
    second = fat(entry(MACHINE, 100, code[100]), entry(MACHINE, 90, code[90]))
    around = [b"\x7fELF host code", b"data" + MAGIC + b"\xff" * 16, b"the end"]  # four bytes that look like a header
    done, found = run(tmp_path, around[0] + first + around[1] + second + around[2])
    assert done.returncode == 0, done.stderr
    gone = fat(entry(MACHINE, 80, bytes(48)), entry(MACHINE, 90, code[90]), entry(PTX, 90, bytes(48)))
    other = fat(entry(MACHINE, 100, bytes(48)), entry(MACHINE, 90, code[90]))
    assert found == around[0] + gone + around[1] + other + around[2]
    done, found = run(tmp_path, around[0] + first, "--arch", "80")
    assert found is not None and code[80] in found and code[90] not in found


@pytest.mark.parametrize(
    ("library", "said"),
    [
        (b"no code at all", "no machine code for architecture 90; found: none"),
        (fat(entry(MACHINE, 80, b"x" * 48), entry(PTX, 90, b"y" * 48)), "found: [80, 90]"),
        (fat(b"\x02\0\x01\x01" + b"\xff" * 60), "entry of a fat binary"),
    ],
)
def test_what_would_leave_nothing_that_runs_is_refused(library: bytes, said: str, tmp_path: Path) -> None:
    done, found = run(tmp_path, library)
    assert done.returncode == 2 and said in done.stderr and found is None
