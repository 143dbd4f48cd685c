"""scripts/install.sh: every way in which it gives up is one clear sentence, and a second run has nothing to do."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
INPUTS = (
    "pyproject.toml", "requirements/cpu-constraints.txt", "requirements/test-clients.txt", "scripts/install.sh",
    "scripts/lib/common.sh", "scripts/lib/gpu.sh", "scripts/lib/imports.py",
)  # fmt: skip


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The files that an installation depends on, and an empty package, away from the real project."""
    root = tmp_path / "project"
    for name in INPUTS:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    (root / "mslime").mkdir()
    (root / "mslime/__init__.py").write_text("")
    for name in ("README.md", "LICENSE"):
        (root / name).write_text("mslime\n")
    return root


def install(project: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the script from the project's parent."""
    return subprocess.run(
        ["bash", str(project / "scripts/install.sh"), *arguments], cwd=project.parent, env={**os.environ, **env},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def assert_one_clear_sentence(done: subprocess.CompletedProcess[str], says: str) -> None:
    """A failing exit, and on stderr only `error: ...` with a hint."""
    assert done.returncode == 1, (done.stdout, done.stderr)
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 2 and lines[0].startswith("error: ") and lines[1].startswith("  hint: "), done.stderr
    assert re.search(says, done.stderr), done.stderr


def fake_program(directory: Path, name: str, script: str) -> Path:
    """An executable shell script."""
    directory.mkdir(exist_ok=True)
    path = directory / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(("python", "says"), [
    ("python3.9", r"3\.11 or 3\.12.*python3\.9 is 3\.9\.2"), ("nowhere/python", "no Python was found"),
])  # fmt: skip
def test_a_wrong_python_is_named(project: Path, tmp_path: Path, python: str, says: str) -> None:
    fake_program(tmp_path / "bin", "python3.9", "echo 3.9.2")
    assert_one_clear_sentence(install(project, "--cpu", PYTHON=str(tmp_path / "bin" / python)), says)


def test_too_little_disk_is_refused_before_anything_is_written(project: Path) -> None:
    done = install(project, "--cpu", "--venv", "env", MSLIME_MIN_FREE_GIB="1000000")
    assert_one_clear_sentence(done, r"GiB free, and the installation needs 1000000")
    assert not (project.parent / "env").exists()


@pytest.mark.nightly
def test_a_failed_download_is_explained_and_leaves_no_stamp(project: Path) -> None:
    closed = "http://127.0.0.1:9/simple"
    done = install(
        project, *("--cpu", "--venv", "env"), PIP_CONFIG_FILE=os.devnull, PIP_INDEX_URL=closed, PIP_EXTRA_INDEX_URL="",
        PIP_FIND_LINKS="", PIP_RETRIES="0", PIP_DEFAULT_TIMEOUT="2", MSLIME_MIN_FREE_GIB="1",
    )  # fmt: skip
    assert_one_clear_sentence(done, r"could not be downloaded.*log: .*install\.log")
    assert "network" in done.stderr
    assert not (project.parent / "env/.mslime-installed").exists()


@pytest.mark.parametrize(("log", "says"), [
    ("ERROR: Could not install packages: [Errno 28] No space left on device", "disk filled up"),
    ("ERROR: Could not find a version (from versions: 2.9.0)\nERROR: No matching distribution for torch==2.13",
     "a version that mslime pins: No matching distribution for torch==2"),
    ("WARNING: Retrying after connection broken by 'NewConnectionError'\nERROR: No matching distribution for torch",
     "could not be downloaded: No matching distribution"),
    ("error: Cannot update time stamp of directory 'mslime.egg-info'", "copy the checkout"),
], ids=["full disk", "no such version", "index out of reach", "checkout that cannot be written"])  # fmt: skip
def test_what_pip_failed_of_is_explained(project: Path, log: str, says: str) -> None:
    (project / "pip.log").write_text(f"Collecting torch\n{log}\n")
    explain = f"source {project}/scripts/lib/common.sh; explain_pip {project}/pip.log"
    done = subprocess.run(["bash", "-c", explain], capture_output=True, text=True, timeout=20, check=False)
    assert_one_clear_sentence(done, says)


def test_the_quickstart_refuses_a_place_that_cannot_be_written_before_it_installs(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    out = str(tmp_path / "file" / "out")
    done = subprocess.run(
        ["bash", str(ROOT / "scripts/quickstart.sh"), "--venv", str(tmp_path / "venv"), "--out", out],
        capture_output=True, text=True, timeout=20, check=False,
    )  # fmt: skip
    assert_one_clear_sentence(done, f"{out} cannot be written")
    assert not (tmp_path / "venv").exists()


def fake_python(directory: Path) -> Path:
    """A Python whose environments contain a pip that does nothing and takes note, so that runs can be counted."""
    return fake_program(
        directory,
        "python3.11",
        """case "$*" in
*"-m venv"*) for target; do :; done; mkdir -p "$target/bin"; cp "$0" "$target/bin/python" ;;
*"-m pip"*show*) exit 1 ;;
*"-m pip"*) echo "$*" >> "$(dirname "$0")/calls" ;;
*version_info*) echo 3.11.9 ;;
esac""",
    )


def test_a_second_run_skips_and_a_changed_pin_does_not(project: Path, tmp_path: Path) -> None:
    python, calls = str(fake_python(tmp_path / "bin")), tmp_path / "env/bin/calls"
    options = ("--cpu", "--dev", "--venv", "env")
    first = install(project, *options, PYTHON=python)
    assert first.returncode == 0, first.stderr
    lines = calls.read_text().splitlines()
    assert any("-e .[cpu,dev]" in line for line in lines), lines
    beside = f"--no-deps --target {tmp_path}/env/clients -r requirements/test-clients.txt"
    assert any(beside in line for line in lines), lines
    assert any("--no-deps" in line and "sglang==0.5.23" in line for line in lines), lines
    assert "CUDA packages" in first.stdout, "the reason for --no-deps is printed"

    second = install(project, *options, PYTHON=python)
    assert second.returncode == 0 and "already installed" in second.stdout
    assert calls.read_text().splitlines() == lines

    with (project / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    assert install(project, *options, PYTHON=python).returncode == 0
    assert len(calls.read_text().splitlines()) == 2 * len(lines)


def test_what_is_said_to_activate_can_be_pasted(project: Path, tmp_path: Path) -> None:
    """Also where the environment's path has a blank."""
    done = install(project, "--cpu", "--venv", "my env", PYTHON=str(fake_python(tmp_path / "bin")))
    assert done.returncode == 0, done.stderr
    (tmp_path / "my env/bin/activate").write_text("echo activated")
    pasted = done.stdout.splitlines()[-1].partition("activate with: ")[2]
    assert subprocess.run(["bash", "-c", pasted], capture_output=True, text=True, check=True).stdout == "activated\n"


def test_other_extras_are_another_installation(project: Path, tmp_path: Path) -> None:
    python, calls = str(fake_python(tmp_path / "bin")), tmp_path / "env/bin/calls"
    assert install(project, "--cpu", "--venv", "env", PYTHON=python).returncode == 0
    before = len(calls.read_text().splitlines())
    assert "clients" not in calls.read_text(), "they are for tests"
    assert install(project, "--cpu", "--dev", "--venv", "env", PYTHON=python).returncode == 0
    assert len(calls.read_text().splitlines()) > before


def test_a_further_torch_index_is_handed_to_pip(project: Path, tmp_path: Path) -> None:
    python = str(fake_python(tmp_path / "bin"))
    done = install(project, "--cpu", "--venv", "env", PYTHON=python, MSLIME_TORCH_INDEX="file:///wheels")
    assert done.returncode == 0
    assert "--extra-index-url file:///wheels" in (tmp_path / "env/bin/calls").read_text()


# ------------------------------------------------------------------------------------------------------------ --gpu


def fake_gpu_python(directory: Path, imports: str = "exit 0") -> Path:
    """Like `fake_python`; its pip "compiles" a wheel, and takes note of the variables it was given."""
    return fake_program(
        directory,
        "python3.11",
        f"""here="$(dirname "$0")"
case "$*" in
*"-m venv"*) for target; do :; done; mkdir -p "$target/bin"; cp "$0" "$target/bin/python" ;;
*"pip"*" wheel "*)
  while [ "$1" != -w ]; do shift; done
  : > "$2/transformer_engine_torch-2.20.2-cp311-cp311-linux_x86_64.whl"
  given="$NVTE_FRAMEWORK $NVTE_BUILD_USE_NVIDIA_WHEELS $NVTE_PYTORCH_FORCE_BUILD"
  echo "wheel $given jobs=$MAX_JOBS" >> "$here/calls" ;;
*"-m pip"*) echo "$*" >> "$here/calls" ;;
*imports.py*) echo "$*" >> "$here/calls"; {imports} ;;
*sysconfig*) exec {sys.executable} "$@" ;;
*importlib.metadata*) echo 2.14.1 ;;
*version_info*) echo 3.11.9 ;;
esac""",
    )


def install_gpu(project: Path, python: Path, programs: Path, **env: str) -> subprocess.CompletedProcess[str]:
    path = f"{programs}:{os.environ['PATH']}"
    options = {"MSLIME_MIN_FREE_GIB": "1", "PATH": path, "PYTHON": str(python), **env}
    return install(project, "--gpu", "--venv", "env", **options)


@pytest.fixture
def headers() -> None:
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        pytest.skip("this Python came without its headers")


@pytest.fixture
def no_driver(tmp_path: Path) -> Path:
    """Programs of a machine without a GPU, some of which have a useless nvidia-smi."""
    return fake_program(tmp_path / "machine", "nvidia-smi", "exit 9").parent


@pytest.mark.usefixtures("headers")
def test_the_extension_is_compiled_before_anything_is_imported(project: Path, tmp_path: Path, no_driver: Path) -> None:
    done = install_gpu(project, fake_gpu_python(tmp_path / "bin"), no_driver, MAX_JOBS="3")
    assert done.returncode == 0, (done.stdout, done.stderr)
    extra, compiled, installed, imported = (tmp_path / "env/bin/calls").read_text().splitlines()
    assert "-e .[gpu]" in extra
    assert compiled == "wheel pytorch 1 TRUE jobs=3"
    assert "install --no-deps" in installed and "wheels/torch-2.14.1/transformer_engine_torch-2.20.2" in installed
    for module in ("torch", "megatron.core", "transformer_engine.pytorch", "sglang", "ray", "transformers", "mslime"):
        assert module in imported
    assert done.stdout.splitlines()[-1].startswith("no NVIDIA driver")


@pytest.mark.usefixtures("headers")
def test_an_interrupted_installation_compiles_only_once(project: Path, tmp_path: Path, no_driver: Path) -> None:
    python, calls = fake_gpu_python(tmp_path / "bin"), tmp_path / "env/bin/calls"
    assert install_gpu(project, python, no_driver).returncode == 0
    (tmp_path / "env/.mslime-installed").unlink()
    assert install_gpu(project, python, no_driver).returncode == 0
    assert sum(line.startswith("wheel ") for line in calls.read_text().splitlines()) == 1
    assert "already installed" in install_gpu(project, python, no_driver).stdout


@pytest.mark.usefixtures("headers")
def test_an_import_that_fails_is_printed_with_its_exception(project: Path, tmp_path: Path, no_driver: Path) -> None:
    broken = "echo 'import megatron.core fails: FileNotFoundError: no shared object'; exit 1"
    done = install_gpu(project, fake_gpu_python(tmp_path / "bin", broken), no_driver)
    assert_one_clear_sentence(done, "import megatron.core fails: FileNotFoundError: no shared object")
    assert not (tmp_path / "env/.mslime-installed").exists()


def test_the_import_check_names_module_and_exception_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "broken_library.py").write_text("raise FileNotFoundError('no shared\\nobject')\n")
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/lib/imports.py", "json", "broken_library", "math"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1 and "Traceback" in done.stderr
    assert done.stdout.splitlines()[-1] == "import broken_library fails: FileNotFoundError: no shared object"


@pytest.mark.usefixtures("headers")
def test_a_driver_that_is_too_old_is_refused_with_a_way_round(project: Path, tmp_path: Path) -> None:
    old = fake_program(tmp_path / "old", "nvidia-smi", "echo 550.54.15").parent
    python = fake_gpu_python(tmp_path / "bin")
    done = install_gpu(project, python, old)
    assert_one_clear_sentence(done, r"driver is 550\.54\.15.*580 or newer")
    assert "cuda-compat" in done.stderr and not (tmp_path / "env").exists()
    assert install_gpu(project, python, old, MSLIME_ANY_DRIVER="1").returncode == 0
    new = fake_program(tmp_path / "new", "nvidia-smi", "echo 580.65.06").parent
    again = install(
        project, "--gpu", "--venv", "other",
        PATH=f"{new}:{os.environ['PATH']}", PYTHON=str(python), MSLIME_MIN_FREE_GIB="1",
    )  # fmt: skip
    assert again.returncode == 0 and "NVIDIA driver 580.65.06" in again.stdout


# -------------------------------------------------------------------------------------------------------- the image

DOCKERFILE = (ROOT / "deploy/Dockerfile").read_text()


def instructions() -> list[str]:
    """The Dockerfile's instructions in order, each in one line, without comments."""
    text = "\n".join(line for line in DOCKERFILE.splitlines() if not line.lstrip().startswith("#"))
    return [line for line in re.sub(r"\\\n\s*", " ", text).splitlines() if line]


def position(words: str) -> int:
    found = [i for i, line in enumerate(instructions()) if words in line]
    assert len(found) == 1, (words, found)
    return found[0]


def test_the_image_compiles_the_extension_before_it_imports_anything() -> None:
    """The script itself compiles and then checks: nothing imports before it, nothing is compiled after it."""
    script = position("scripts/install.sh --gpu")
    assert all("import" not in line and "mslime --help" not in line for line in instructions()[:script])
    assert all("transformer" not in line for line in instructions()[script + 1 :])
    body = (ROOT / "scripts/install.sh").read_text()
    assert body.index('build_extension "$venv"') < body.index('check_imports "$venv"')


def test_the_image_has_what_rdma_and_compilers_need() -> None:
    packages = instructions()[position("apt-get install")]
    for package in ("libibverbs1", "ibverbs-providers", "librdmacm1", "build-essential", "python3-dev", "python3-venv"):
        assert f" {package} " in packages, package
    for option in ("--network host", "--ulimit memlock=-1", "--device /dev/infiniband", "--shm-size", ":/cache"):
        assert option in DOCKERFILE, option
    assert "VOLUME /cache" in DOCKERFILE


def test_apex_is_built_only_when_asked_for() -> None:
    assert "ARG APEX_REF=" in instructions(), "off by default"
    assert "APEX_REF=25.09" in DOCKERFILE, "a tag that exists is named"


def test_the_gpu_extra_has_what_every_family_asks_for() -> None:
    """`model/chunks.py` refuses a layer without these packages; and pip before 23.3 drops an extra spelt with `_`."""
    gpu = PROJECT["optional-dependencies"]["gpu"]
    names = {re.split(r"[\[=<> ;]", requirement)[0] for requirement in gpu}
    specs = (ROOT / "mslime/backends/megatron/model/chunks.py").read_text()
    packages = {"transformer_engine": "transformer-engine", "fla": "flash-linear-attention"}
    asked = set(re.findall(r'find_spec\("(\w+)"\)', specs)) | set(re.findall(r'_require\("(\w+)"', specs))
    assert asked == set(packages), "a new kernel package: add it to the extra, and here"
    assert {packages[module] for module in asked} | {"transformer-engine-cu13"} <= names
    assert not any("_" in extra for requirement in gpu for extra in re.findall(r"\[(.*?)\]", requirement))
    version = re.search(r"^TE_VERSION=(.*)$", (ROOT / "scripts/lib/gpu.sh").read_text(), re.M)
    assert version and f"transformer-engine=={version[1]}" in gpu


def test_unknown_options_are_refused(project: Path) -> None:
    assert_one_clear_sentence(install(project, "--cuda"), "unknown option --cuda")
    assert install(project, "--help").returncode == 0


def test_apex_and_torchvision_are_no_dependency() -> None:
    """`apex` on PyPI is an unrelated project; torchvision's wheel breaks transformers beside a CPU torch."""
    wanted = [*PROJECT["dependencies"], *(d for group in PROJECT["optional-dependencies"].values() for d in group)]
    names = {re.split(r"[\[=<> ;]", d)[0].lower() for d in wanted}
    assert not names & {"apex", "torchvision"}
    constrained = (ROOT / "requirements/cpu-constraints.txt").read_text().lower()
    assert "torchvision" not in constrained and "\napex" not in constrained


def test_every_cpu_pin_is_also_the_constrained_version() -> None:
    lines = (ROOT / "requirements/cpu-constraints.txt").read_text().lower().splitlines()
    constrained = dict(line.split("==") for line in lines if "==" in line)
    extras = PROJECT["optional-dependencies"]
    for requirement in [*PROJECT["dependencies"], *extras["cpu"], *extras["dev"]]:
        name, _, version = re.sub(r"\[.*?\]", "", requirement).lower().partition("==")
        known = constrained.get(name, constrained.get(name.replace("-", "_")))
        assert not version or known in (None, version), f"{requirement} against {known}"
