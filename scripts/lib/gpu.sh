# Steps of install.sh --gpu beyond pip: the driver, the compiler, and Transformer Engine's torch extension.

# First driver for CUDA 13, for which torch 2.14.1, pinned by SGLang, is built.
NEEDED_DRIVER=580
TE_VERSION=2.20.2

# driver_version: version of the NVIDIA driver, empty without one.
driver_version() {
  command -v nvidia-smi >/dev/null 2>&1 || return 0
  nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1 | grep -E '^[0-9]+' || true
}

# check_driver: rejects a driver without CUDA 13. A missing driver is fine: images are built and checked without GPUs.
check_driver() {
  local version
  version="$(driver_version)"
  if [ -z "$version" ] || [ "${version%%.*}" -ge "$NEEDED_DRIVER" ]; then return 0; fi
  [ "${MSLIME_ANY_DRIVER:-0}" = 1 ] ||
    fail "the NVIDIA driver is $version, and torch for CUDA 13 needs $NEEDED_DRIVER or newer" \
      "update the driver; or, on data-centre GPUs, install NVIDIA's forward compatibility package (cuda-compat-13-0) and run this with MSLIME_ANY_DRIVER=1"
}

# check_compiler PYTHON: the extension needs a C++ compiler and Python's headers.
check_compiler() {
  local include
  command -v g++ >/dev/null 2>&1 ||
    fail "no C++ compiler (g++) was found, and Transformer Engine's torch extension needs one" \
      "install it: on Debian and Ubuntu the package build-essential"
  include="$("$1" -c 'import sysconfig; print(sysconfig.get_path("include"))')"
  [ -f "$include/Python.h" ] ||
    fail "Python's headers are missing ($include/Python.h), which Transformer Engine's torch extension needs" \
      "install them: on Debian and Ubuntu the package python3-dev (or python3.11-dev)"
}

# compile_jobs: number of parallel compilers; each takes up to 4 GiB.
compile_jobs() {
  local cores memory
  cores="$(nproc 2>/dev/null || echo 1)"
  memory="$(awk '/^MemAvailable:/ { printf "%d", $2 / 4194304 }' /proc/meminfo 2>/dev/null || echo 1)"
  [ "${memory:-0}" -ge 1 ] || memory=1
  if [ -n "${MAX_JOBS:-}" ]; then echo "$MAX_JOBS"; elif [ "$memory" -lt "$cores" ]; then echo "$memory"; else echo "$cores"; fi
}

# compile_extension VENV INTO: a wheel of transformer_engine_torch for the environment's torch. The index has only its
# source. NVTE_BUILD_USE_NVIDIA_WHEELS takes the CUDA and cuDNN headers from the packages that torch installed: an
# installed CUDA toolkit has no cuDNN. NVTE_PYTORCH_FORCE_BUILD stops its setup.py from looking for a prebuilt file on the
# network.
compile_extension() {
  NVTE_FRAMEWORK=pytorch NVTE_BUILD_USE_NVIDIA_WHEELS=1 NVTE_PYTORCH_FORCE_BUILD="${NVTE_PYTORCH_FORCE_BUILD:-TRUE}" \
    MAX_JOBS="$(compile_jobs)" \
    pip wheel -v --no-deps --no-build-isolation --no-cache-dir -w "$2" "transformer_engine_torch==$TE_VERSION"
}

# build_extension VENV: compiles and installs it, once for every torch.
build_extension() {
  local venv="$1" torch wheels
  torch="$("$venv/bin/python" -c 'from importlib.metadata import version; print(version("torch"))')"
  wheels="$venv/wheels/torch-$torch"
  if ! ls "$wheels"/transformer_engine_torch-"$TE_VERSION"-*.whl >/dev/null 2>&1; then
    mkdir -p "$wheels"
    compile_extension "$venv" "$wheels"
  fi
  pip install --no-deps --force-reinstall "$wheels"/transformer_engine_torch-"$TE_VERSION"-*.whl
}

# describe_gpus: the last line of the installation.
describe_gpus() {
  local version
  version="$(driver_version)"
  if [ -z "$version" ]; then
    say "no NVIDIA driver was found on this machine. All packages import; a run needs a machine with driver $NEEDED_DRIVER or newer"
  else
    say "NVIDIA driver $version; GPUs: $(nvidia-smi --query-gpu=name --format=csv,noheader | sort | uniq -c | sed 's/^ *//' | paste -sd, -)"
  fi
}

# check_bundle DIR: rejects what is not a whole bundle of scripts/bundle.sh.
check_bundle() {
  local wrong
  [ -f "$1/SHA256SUMS" ] || fail "$1 is not a bundle: it has no SHA256SUMS" "make one with bash scripts/bundle.sh --out DIR"
  wrong="$(cd "$1" && LC_ALL=C sha256sum --quiet -c SHA256SUMS 2>/dev/null | sed 's/: FAILED.*//' | paste -sd ' ' -)" || true
  [ -z "$wrong" ] || fail "parts of $1 are damaged or missing: $wrong" "copy them again"
}

# unpack_bundle DIR INTO PYTHON: wheels for this Python.
unpack_bundle() {
  local version
  cat "$1"/part-* | xz -T0 -dc | tar -x -C "$2" || fail "$1 could not be unpacked into $2" "free some space, and run this again"
  version="$("$3" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
  [ "$version" = "$(cat "$2/python")" ] ||
    fail "$1 is for Python $(cat "$2/python"), and $3 is $version" \
      "set PYTHON to a Python $(cat "$2/python"), or make the bundle with PYTHON=python$version"
}

# link_left_out PYTHON VENV LIST: links the packages of a list of wheels, in whatever version PYTHON has, into VENV: file by
# file, because NVIDIA's packages share directories, and torch's libraries look for theirs beside themselves. Prints those
# that PYTHON lacks.
link_left_out() {
  "$1" - "$("$2/bin/python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')" "$3" <<'PY'
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

own, missing = Path(sys.argv[1]), []
for wheel in Path(sys.argv[2]).read_text().split():
    name = wheel.split("-")[0]
    try:
        files = distribution(name).files or []
    except PackageNotFoundError:
        missing.append(name)
        continue
    for file in files:
        link = own / file
        if ".." in file.parts or file.suffix == ".pyc" or link.exists():
            continue
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(file.locate())
print(*missing)
PY
}
