"""A library that keeps the code of one kind of GPU: what goes, what stays, and what is no fat binary."""

from __future__ import annotations

import base64
import hashlib
import struct
import subprocess
import sys
import zipfile
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


def test_ptx_stays_where_the_driver_would_compile_it(tmp_path: Path) -> None:
    compiled = fat(entry(MACHINE, 90, b"m" * 48), entry(PTX, 80, b"p" * 48))
    kinds = [(PTX, 80, b"a"), (PTX, 90, b"b"), (PTX, 100, b"c"), (MACHINE, 80, b"d")]
    done, found = run(tmp_path, compiled + fat(*[entry(kind, arch, code * 48) for kind, arch, code in kinds]))
    assert done.returncode == 0, done.stderr
    cleared = [(PTX, 80, b"a"), (PTX, 90, b"b"), (PTX, 100, b"\0"), (MACHINE, 80, b"\0")]
    others = fat(*[entry(kind, arch, code * 48) for kind, arch, code in cleared])
    assert found == fat(entry(MACHINE, 90, b"m" * 48), entry(PTX, 80, bytes(48))) + others


def test_a_wheel_keeps_what_is_no_code_for_gpus_and_lists_its_new_sums(tmp_path: Path) -> None:
    files = {
        "kernels/sm90.so": fat(entry(MACHINE, 80, b"x" * 48), entry(MACHINE, 90, b"y" * 48)),
        "kernels/sm80.so": fat(entry(MACHINE, 80, b"x" * 48), entry(PTX, 80, b"p" * 48)),  # PTX for every newer GPU
        "kernels/__init__.py": b"import os, this\n",
        "kernels/flash.so": fat(entry(MACHINE, 90, b"z" * 48)),
        "kernels-1.dist-info/METADATA": b"Metadata-Version: 2.1\nName: kernels\nVersion: 1\n",
        "kernels-1.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: py3-none-any\n",
    }
    wheel, bundle = tmp_path / "kernels-1-py3-none-any.whl", tmp_path / "bundle"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        archive.writestr("kernels-1.dist-info/RECORD", "".join(f"{name},sha256=old,1\n" for name in files))
    command = [sys.executable, TOOL, wheel, bundle, "--without", "*/flash*"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(bundle / wheel.name) as archive:
        found = {name: archive.read(name) for name in archive.namelist()}
    record = found.pop("kernels-1.dist-info/RECORD").decode().splitlines()
    trimmed = fat(entry(MACHINE, 80, bytes(48)), entry(MACHINE, 90, b"y" * 48))
    del files["kernels/flash.so"]
    assert found == files | {"kernels/sm90.so": trimmed}
    sums = dict(row.split(",", 1) for row in record)
    digest = base64.urlsafe_b64encode(hashlib.sha256(trimmed).digest()).rstrip(b"=").decode()
    assert sums.pop("kernels/sm90.so") == f"sha256={digest},{len(trimmed)}"
    assert sums == {name: "sha256=old,1" for name in files if name != "kernels/sm90.so"}
    command = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--target", tmp_path / "to"]
    installed = subprocess.run([*command, bundle / wheel.name], capture_output=True, text=True, check=False)
    assert installed.returncode == 0, installed.stderr
    assert (tmp_path / "to/kernels/sm90.so").read_bytes() == trimmed


@pytest.mark.parametrize(
    ("library", "said"),
    [
        (b"no code at all", "no machine code for architecture 90; found: none"),
        (fat(entry(MACHINE, 80, b"x" * 48), entry(PTX, 90, b"y" * 48)), "found: [80]"),
        (fat(b"\x02\0\x01\x01" + b"\xff" * 60), "entry of a fat binary"),
    ],
)
def test_what_would_leave_nothing_that_runs_is_refused(library: bytes, said: str, tmp_path: Path) -> None:
    done, found = run(tmp_path, library)
    assert done.returncode == 2 and said in done.stderr and found is None
