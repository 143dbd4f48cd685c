#!/usr/bin/env bash
# Packs the GPU packages for a machine that reaches no package index. scripts/install.sh --gpu --from DIR installs them.
set -euo pipefail
caller="$PWD"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/lib/common.sh
source scripts/lib/gpu.sh

usage() {
  cat <<'TEXT'
Usage: bash scripts/bundle.sh [--out DIR] [--arch N] [--part-mb N] [--slim] [--leave-out PATTERN]...
                              [--without PATTERN]... [--wheels DIR] [--help]

Downloads the wheels of scripts/install.sh --gpu for the Python that runs it, compiles Transformer Engine's torch
extension, removes the code for all GPUs but one kind, and writes the wheels as compressed parts with checksums. On the
other machine, which needs no compiler, from a checkout of the same commit and with the same version of Python:

    bash scripts/install.sh --gpu --from DIR

Takes 25 GB, and about 45 minutes of one core the first time.

  --out DIR            the parts (default bundle)
  --arch N             compute capability of the GPUs without the point (default 90: H100, H200)
  --part-mb N          largest size of a part (default 60)
  --slim               leave out what a run with sglang.attention_backend: triton does not use, as far as it was tried
                       (requirements/slim-bundle.txt)
  --leave-out PATTERN  leave out packages whose wheel's name matches, for example 'nvidia_cublas-*'; the environment there
                       uses the packages of the Python that makes it
  --without PATTERN    leave out wheels by name, or files of wheels, for example 'tilelang-*' or 'sgl_kernel/flash_ops*'
  --wheels DIR         pack these wheels; without this they are downloaded and compiled into DIR of --out with .wheels,
                       and kept there for the next time

Environment:
  PYTHON              the Python to use, 3.11 or 3.12, of the other machine's version
  MSLIME_MIN_FREE_GIB required free disk space (default 30)
  MAX_JOBS            parallel compilers for the extension (default: one for each core and 4 GiB of memory)
  pip's own variables (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, HTTPS_PROXY, ...) are honoured.
TEXT
}

out="bundle" arch=90 part_mb=60 wheels="" leave_out=() without=()
while [ $# -gt 0 ]; do
  case "$1" in
    --out | --arch | --part-mb | --leave-out | --without | --wheels)
      [ $# -ge 2 ] || fail "$1 needs a value" "see bash scripts/bundle.sh --help"
      case "$1" in
        --out) out="$2" ;;
        --arch) arch="$2" ;;
        --part-mb) part_mb="$2" ;;
        --leave-out) leave_out+=("$2") ;;
        --without) without+=("$2") ;;
        --wheels) wheels="$2" ;;
      esac
      shift
      ;;
    --slim) while read -r pattern; do without+=("$pattern"); done < <(grep -v '^#' requirements/slim-bundle.txt) ;;
    --help | -h)
      usage
      exit 0
      ;;
    *) fail "unknown option $1" "see bash scripts/bundle.sh --help" ;;
  esac
  shift
done
for option in "--arch $arch" "--part-mb $part_mb"; do
  [[ "$option" =~ \ [1-9][0-9]*$ ]] || fail "$option: must be a whole number above 0" "use for example --arch 90 --part-mb 60"
done
out="$(absolute "$out")" given="$wheels"
wheels="$(absolute "${wheels:-$out.wheels}")"
[ -z "$given" ] || ls "$wheels"/*.whl >/dev/null 2>&1 || fail "$wheels holds no wheels" "leave out --wheels: they are then downloaded"
[ ! -e "$out" ] || [ -e "$out/SHA256SUMS" ] || [ -z "$(ls -A "$out")" ] ||
  fail "$out exists, and is not a bundle" "choose another directory with --out DIR"
command -v xz >/dev/null 2>&1 || fail "xz was not found, which compresses the parts" \
  "install it: on Debian and Ubuntu the package xz-utils"

python="$(find_python)"
version="$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
[ -n "$given" ] || check_compiler "$python"
need_disk "$(dirname "$out")" "${MSLIME_MIN_FREE_GIB:-30}"
mkdir -p "$wheels"
log="$wheels/bundle.log"
: >"$log"
if [ -z "$given" ]; then
  # The requirements of `pip install .[gpu]`, and what builds mslime there and tests the GPU.
  packages="$wheels/packages.txt" known="$wheels/.downloaded" venv="$wheels/environment"
  "$python" - >"$packages" <<'PY'
import tomllib

project = tomllib.load(open("pyproject.toml", "rb"))
backend, extras = project["build-system"]["requires"], project["project"]["optional-dependencies"]
tests = [package for package in extras["dev"] if package.startswith("pytest")]
print("\n".join([*backend, "wheel", *project["project"]["dependencies"], *extras["gpu"], *tests]))
PY
  wanted="$version $TE_VERSION $(cksum <"$packages")"
  if [ ! -f "$known" ] || [ "$(cat "$known")" != "$wanted" ]; then
    say "1/4 downloading wheels for Python $version into $wheels (about 4 GB)"
    rm -rf "$known" "$venv" "$wheels"/*.whl
    quietly "$log" "$python" -m pip --disable-pip-version-check --no-input download --only-binary=:all: -d "$wheels" -r "$packages"
    printf '%s' "$wanted" >"$known"
  fi
  if ! ls "$wheels"/transformer_engine_torch-"$TE_VERSION"-*.whl >/dev/null 2>&1; then
    say "2/4 compiling Transformer Engine's torch extension ($(compile_jobs) compilers at a time)"
    pip() { quietly "$log" "$venv/bin/python" -m pip --disable-pip-version-check --no-input "$@"; }
    if [ ! -f "$venv/.complete" ]; then
      "$python" -m venv --clear "$venv"
      pip install --no-index --no-deps "$wheels"/*.whl
      : >"$venv/.complete"
    fi
    compile_extension "$venv" "$wheels"
  fi
fi

say "3/4 keeping the code for compute capability $arch"
packed="$out.packed" new="$out.new"
rm -rf "$packed" "$new"
mkdir -p "$packed" "$new"
: >"$packed/left_out"
# matches NAME PATTERN...: whether one of the patterns does.
matches() {
  local name="$1" pattern
  shift
  for pattern in "$@"; do
    # shellcheck disable=SC2053  # the pattern is one
    if [[ "$name" == $pattern ]]; then return 0; fi
  done
  return 1
}
files=()
for pattern in ${without[@]+"${without[@]}"}; do files+=(--without "$pattern"); done
for file in "$wheels"/*.whl; do
  name="$(basename "$file")"
  if matches "$name" ${leave_out[@]+"${leave_out[@]}"}; then
    printf '%s\n' "$name" >>"$packed/left_out"
  elif ! matches "$name" ${without[@]+"${without[@]}"}; then
    "$python" tools/one_gpu_only.py "$file" "$packed" --arch "$arch" ${files[@]+"${files[@]}"} >>"$log" 2>&1 ||
      fail "$(tail -n 1 "$log") (log: $log)" "download it again: remove $wheels, and run this again"
  fi
done
printf '%s\n' "$version" >"$packed/python"
printf '%s\n' "$arch" >"$packed/arch"

say "4/4 compressing $(du -sm "$packed" | cut -f 1) MB"
tar -C "$packed" -c . | xz -T0 -5 | split -b "${part_mb}MB" -d -a 3 - "$new/part-"
(cd "$new" && sha256sum part-* >SHA256SUMS)
rm -rf "$packed" "$out"
mv "$new" "$out"
say "wrote $(ls "$out"/part-* | wc -l) parts, $(du -sm "$out" | cut -f 1) MB, to $out"
say "on the other machine: bash scripts/install.sh --gpu --from DIR"
