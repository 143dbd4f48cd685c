"""A bundle of wheels for a machine without a package index: made in parts, and checked before anything is installed."""

from __future__ import annotations

import hashlib
import lzma
import os
import random
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.unit.test_one_gpu_only import MACHINE, entry, fat

ROOT = Path(__file__).parents[2]
HERE = f"{sys.version_info[0]}.{sys.version_info[1]}"
MADE_UP = random.Random(0).randbytes(2_500_000)
CODE = fat(entry(MACHINE, 80, b"x" * 48), entry(MACHINE, 90, b"y" * 48))


def wheel(directory: Path, name: str, content: bytes) -> None:
    directory.mkdir(exist_ok=True)
    with zipfile.ZipFile(directory / f"{name}-1-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}/lib.so", content)
        archive.writestr(f"{name}/notes", b"of no use")
        archive.writestr(f"{name}-1.dist-info/RECORD", f"{name}/lib.so,,\n{name}/notes,,\n")


def run(script: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHON": sys.executable, "MSLIME_MIN_FREE_GIB": "0"}
    command = ["bash", ROOT / "scripts" / script, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    wheels, out = tmp_path / "downloaded wheels", tmp_path / "a bundle"
    wheel(wheels, "kernels", CODE)
    wheel(wheels, "large", MADE_UP)
    wheel(wheels, "nvidia_cublas", b"the other machine has it")
    wheel(wheels, "tilelang", b"of no use either")
    made = run("bundle.sh", "--out", out, "--wheels", wheels, "--part-mb", "1", "--leave-out", "nvidia_*",
               "--without", "*/notes", "--without", "tilelang-*")  # fmt: skip
    assert made.returncode == 0, made.stderr
    return out


def test_a_bundle_holds_trimmed_wheels_in_parts(bundle: Path, tmp_path: Path) -> None:
    parts = sorted(bundle.glob("part-*"))
    assert [part.stat().st_size for part in parts[:2]] == [1_000_000] * 2 and len(parts) == 3
    sums = [f"{hashlib.sha256(part.read_bytes()).hexdigest()}  {part.name}" for part in parts]
    assert (bundle / "SHA256SUMS").read_text().splitlines() == sums
    whole = tmp_path / "whole.tar"
    whole.write_bytes(lzma.decompress(b"".join(part.read_bytes() for part in parts)))
    with tarfile.open(whole) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    unpacked = tmp_path / "unpacked"
    names = [
        "arch",
        "kernels-1-py3-none-any.whl",
        "large-1-py3-none-any.whl",
        "left_out",
        "python",
    ]
    assert sorted(path.name for path in unpacked.iterdir()) == names
    assert (unpacked / "left_out").read_text() == "nvidia_cublas-1-py3-none-any.whl\n"
    with zipfile.ZipFile(unpacked / "kernels-1-py3-none-any.whl") as archive:
        assert archive.read("kernels/lib.so") == CODE.replace(b"x" * 48, bytes(48))
        assert "kernels/notes" not in archive.namelist()
    with zipfile.ZipFile(unpacked / "large-1-py3-none-any.whl") as archive:
        assert archive.read("large/lib.so") == MADE_UP


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda part: part.unlink(), "damaged or missing: part-001"),
        (lambda part: part.write_bytes(b"\0" + part.read_bytes()[1:]), "damaged or missing: part-001"),
        (lambda part: (part.parent / "SHA256SUMS").unlink(), "is not a bundle: it has no SHA256SUMS"),
    ],
)
def test_a_bundle_that_is_not_whole_is_refused_before_anything_is_made(
    spoil: object, said: str, bundle: Path, tmp_path: Path
) -> None:
    assert callable(spoil)
    spoil(bundle / "part-001")
    done = run("install.sh", "--gpu", "--from", bundle, "--venv", tmp_path / "venv")
    assert done.returncode == 1 and said in done.stderr and not (tmp_path / "venv").exists()


def test_a_bundle_for_another_python_is_refused(bundle: Path, tmp_path: Path) -> None:
    other = "3.12" if HERE == "3.11" else "3.11"
    packed, unpacked = tmp_path / "whole.tar", tmp_path / "unpacked"
    packed.write_bytes(lzma.decompress(b"".join(part.read_bytes() for part in sorted(bundle.glob("part-*")))))
    with tarfile.open(packed) as archive:
        archive.extractall(unpacked, filter="data")
    assert (unpacked / "python").read_text() == f"{HERE}\n"
    (unpacked / "python").write_text(f"{other}\n")
    with tarfile.open(packed, "w") as archive:
        archive.add(unpacked, ".")
    for part in bundle.iterdir():
        part.unlink()
    content = lzma.compress(packed.read_bytes())
    (bundle / "part-000").write_bytes(content)
    (bundle / "SHA256SUMS").write_text(f"{hashlib.sha256(content).hexdigest()}  part-000\n")
    before = sorted(tmp_path.iterdir())
    done = run("install.sh", "--gpu", "--from", bundle, "--venv", tmp_path / "venv")
    assert done.returncode == 1 and f"is for Python {other}" in done.stderr and f"PYTHON=python{HERE}" in done.stderr
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--arch", "sm_90"], "--arch sm_90: must be a whole number"),
        (["--part-mb", "0"], "--part-mb 0: must be a whole number"),
        (["--wheels", "/no/such/directory"], "holds no wheels"),
        (["--out", str(ROOT / "docs")], "is not a bundle"),
        (["--part-mb"], "--part-mb needs a value"),
    ],
)
def test_mistakes_are_named_before_anything_is_downloaded(arguments: list[str], said: str) -> None:
    done = run("bundle.sh", *arguments)
    assert done.returncode == 1 and said in done.stderr, done.stderr


def test_a_slim_bundle_has_no_attention_kernels_of_its_own(tmp_path: Path) -> None:
    for name in ("sgl_kernel", "flashinfer_python", "torch"):
        wheel(tmp_path / "wheels", name, CODE)
    with zipfile.ZipFile(tmp_path / "wheels" / "sgl_kernel-1-py3-none-any.whl", "a") as archive:
        archive.writestr("sgl_kernel/flash_ops.abi3.so", MADE_UP)
    made = run("bundle.sh", "--slim", "--out", tmp_path / "bundle", "--wheels", tmp_path / "wheels")
    assert made.returncode == 0, made.stderr
    (tmp_path / "tar").write_bytes(lzma.decompress((tmp_path / "bundle" / "part-000").read_bytes()))
    with tarfile.open(tmp_path / "tar") as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    assert sorted(path.name.split("-")[0] for path in (tmp_path / "unpacked").glob("*.whl")) == ["sgl_kernel", "torch"]
    with zipfile.ZipFile(tmp_path / "unpacked" / "sgl_kernel-1-py3-none-any.whl") as kernels:
        assert "sgl_kernel/flash_ops.abi3.so" not in kernels.namelist() and "sgl_kernel/lib.so" in kernels.namelist()


def test_a_bundle_is_for_gpus_alone(tmp_path: Path) -> None:
    done = run("install.sh", "--cpu", "--from", tmp_path)
    assert done.returncode == 1 and "--from installs the GPU packages alone" in done.stderr


def test_what_a_bundle_leaves_out_comes_from_the_other_python(tmp_path: Path) -> None:
    """That Python may be a virtual environment, and nothing else of it becomes visible."""
    for name in ("other", "own"):
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / name], check=True)
    theirs, own = (next((tmp_path / name / "lib").glob("python*")) / "site-packages" for name in ("other", "own"))
    content = {
        "nvidia/cu13/lib/libcudart.so": "theirs",
        "nvidia/cu13/lib/libcublas.so": "theirs",
        "nvidia_cuda-9.dist-info/METADATA": "Name: nvidia-cuda\nVersion: 9\n",
    }
    for path, text in content.items():
        (theirs / path).parent.mkdir(parents=True, exist_ok=True)
        (theirs / path).write_text(text)
    (theirs / "nvidia_cuda-9.dist-info/RECORD").write_text("".join(f"{path},,\n" for path in content))
    (theirs / "other.py").touch()
    (own / "nvidia/cu13/lib").mkdir(parents=True)
    (own / "nvidia/cu13/lib/libcublas.so").write_text("own")
    (tmp_path / "left_out").write_text("nvidia_cuda-9.2-py3-none-any.whl\ntilelang-1-py3-none-any.whl\n")
    script = f"""
        source {ROOT}/scripts/lib/common.sh; source {ROOT}/scripts/lib/gpu.sh
        link_left_out {tmp_path}/other/bin/python {tmp_path}/own {tmp_path}/left_out
        {tmp_path}/own/bin/python -c 'from importlib.metadata import version; print(version("nvidia-cuda"))'
        {tmp_path}/own/bin/python -c 'import other' || echo no other
    """
    done = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["tilelang", "9", "no other"]
    assert (own / "nvidia/cu13/lib/libcudart.so").read_text() == "theirs"
    assert (own / "nvidia/cu13/lib/libcublas.so").read_text() == "own"
