"""Every stub and patch of the SGLang CPU platform works, and is needed: its probe fails without it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mslime.backends.cpu import sglang as platform
from mslime.config.errors import EngineError
from tests.unit.sglang_patch_probes import PROBES

ROOT = Path(__file__).parents[2]
PATCHES = [patch.name for patch in platform.PATCHES]
STUBS = [stub.name for stub in platform.STUBS]
ENV = {**os.environ, "PYTHONPATH": str(ROOT), "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}


def probe(skip: list[str], probes: list[str]) -> dict[str, str]:
    """Results of probes in a fresh process."""
    command = [sys.executable, str(ROOT / "tests/unit/sglang_patch_probes.py"), " ".join(skip), *probes]
    done = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def patched() -> dict[str, str]:
    return probe([], [*STUBS, *PATCHES])


@pytest.fixture(scope="module")
def unpatched() -> dict[str, str]:
    """All patches left out at once; the stubs stay, or sglang could not be imported."""
    return probe(PATCHES, PATCHES)


def test_every_stub_and_patch_has_a_probe_and_a_reason() -> None:
    assert set(PROBES) == set(platform.names())
    assert all(len(entry.reason) > 20 for entry in (*platform.STUBS, *platform.PATCHES))


@pytest.mark.parametrize("name", [*STUBS, *PATCHES])
@pytest.mark.nightly
def test_it_works(name: str, patched: dict[str, str]) -> None:
    assert patched[name] == "ok"


@pytest.mark.parametrize("name", PATCHES)
@pytest.mark.nightly
def test_without_the_patch_its_probe_fails(name: str, unpatched: dict[str, str]) -> None:
    assert unpatched[name] != "ok"


@pytest.mark.parametrize("name", STUBS)
def test_without_the_stub_its_package_is_missing(name: str) -> None:
    assert probe([name], [name])[name].startswith("ModuleNotFoundError")


def test_another_version_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.5.22")
    with pytest.raises(EngineError, match=r"'0\.5\.22'.*0\.5\.23"):
        platform.install()


def test_a_missing_sglang_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    with pytest.raises(EngineError, match="scripts/install.sh"):
        platform.check_version()


def site_process(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """A Python with the platform's sitecustomize, as the children of a server are."""
    path = os.pathsep.join([str(platform.SITE_DIR), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-c", code], env={**ENV, "PYTHONPATH": path, **env}, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip


def test_sitecustomize_installs_the_platform_without_importing_torch() -> None:
    done = site_process("import sys; print(type(sys.meta_path[0]).__name__, 'torch' in sys.modules)")
    assert done.stdout.split() == ["_PatchFinder", "False"], done.stderr


def test_sitecustomize_does_nothing_on_a_gpu() -> None:
    done = site_process("import sys; print('mslime' in sys.modules)", SGLANG_USE_CPU_ENGINE="0")
    assert done.stdout.split() == ["False"], done.stderr


def test_a_process_whose_sglang_is_refused_does_not_start(tmp_path: Path) -> None:
    """Python itself only warns about a failing sitecustomize and would go on without the patches."""
    info = tmp_path / "sglang-0.5.22.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.22\n")
    path = os.pathsep.join([str(platform.SITE_DIR), str(tmp_path), str(ROOT)])
    done = site_process("print('started')", PYTHONPATH=path)
    assert done.returncode != 0 and "started" not in done.stdout and "0.5.22" in done.stderr
