#!/usr/bin/env bash
# Packs the GPU packages for a machine that reaches no package index. scripts/install.sh --gpu --from DIR installs them.
set -euo pipefail
caller="$PWD"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/lib/common.sh
source scripts/lib/gpu.sh

usage() {
  cat <<'TEXT'
Usage: bash scripts/bundle.sh [--out DIR] [--python VERSION] [--arch N] [--part-mb N] [--leave-out PATTERN]...
                              [--without PATTERN]... [--wheels DIR] [--help]

Downloads the wheels of scripts/install.sh --gpu, removes the code for all GPUs but one kind, and writes them as
compressed parts with checksums. On the other machine, from a checkout of the same commit:

    bash scripts/install.sh --gpu --from DIR

  --out DIR            the parts (default bundle)
  --python VERSION     Python of the other machine, 3.11 or 3.12 (default 3.12)
  --arch N             compute capability of its GPUs without the point (default 90: H100, H200)
  --part-mb N          largest size of a part (default 60)
  --leave-out PATTERN  leave out packages whose wheel's name matches, for example 'nvidia_*'; the other machine's Python
                       must have them, and its environment then uses that Python's packages
  --without PATTERN    leave out files of wheels, for example 'sgl_kernel/flash_ops*'
  --wheels DIR         wheels that were downloaded before; without this they are downloaded into DIR of --out with
                       .wheels, and kept there for the next time

Environment:
  PYTHON              the Python whose pip downloads, 3.11 or 3.12
  MSLIME_MIN_FREE_GIB required free disk space (default 20)
  pip's own variables (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, HTTPS_PROXY, ...) are honoured.
TEXT
}

out="bundle" version=3.12 arch=90 part_mb=60 wheels="" leave_out=() without=()
while [ $# -gt 0 ]; do
  case "$1" in
    --out | --python | --arch | --part-mb | --leave-out | --without | --wheels)
      [ $# -ge 2 ] || fail "$1 needs a value" "see bash scripts/bundle.sh --help"
      case "$1" in
        --out) out="$2" ;;
        --python) version="$2" ;;
        --arch) arch="$2" ;;
        --part-mb) part_mb="$2" ;;
        --leave-out) leave_out+=("$2") ;;
        --without) without+=(--without "$2") ;;
        --wheels) wheels="$2" ;;
      esac
      shift
      ;;
    --help | -h)
      usage
      exit 0
      ;;
    *) fail "unknown option $1" "see bash scripts/bundle.sh --help" ;;
  esac
  shift
done
case "$version" in
  3.11 | 3.12) ;;
  *) fail "--python is $version, and mslime needs 3.11 or 3.12" "use --python 3.12, or 3.11" ;;
esac
for option in "--arch $arch" "--part-mb $part_mb"; do
  [[ "$option" =~ \ [1-9][0-9]*$ ]] || fail "$option: must be a whole number above 0" "use for example --arch 90 --part-mb 60"
done
# absolute DIR: resolves DIR from the caller's directory.
absolute() { case "$1" in /*) printf '%s' "$1" ;; *) printf '%s' "$caller/$1" ;; esac; }
out="$(absolute "$out")" given="$wheels"
wheels="$(absolute "${wheels:-$out.wheels}")"
[ -z "$given" ] || ls "$wheels"/*.whl >/dev/null 2>&1 || fail "$wheels holds no wheels" "leave out --wheels: they are then downloaded"
[ ! -e "$out" ] || [ -e "$out/SHA256SUMS" ] || [ -z "$(ls -A "$out")" ] ||
  fail "$out exists, and is not a bundle" "choose another directory with --out DIR"
command -v xz >/dev/null 2>&1 || fail "xz was not found, which compresses the parts" \
  "install it: on Debian and Ubuntu the package xz-utils"

python="$(find_python)"
need_disk "$(dirname "$out")" "${MSLIME_MIN_FREE_GIB:-20}"
mkdir -p "$wheels"
log="$wheels/download.log"
: >"$log"
# The requirements of `pip install .[gpu]`, and what builds mslime and the extension there.
packages="$wheels/packages.txt" known="$wheels/.downloaded"
"$python" - >"$packages" <<'PY'
import tomllib

project = tomllib.load(open("pyproject.toml", "rb"))
backend, extras = project["build-system"]["requires"], project["project"]["optional-dependencies"]["gpu"]
print("\n".join([*backend, "wheel", *project["project"]["dependencies"], *extras]))
PY
wanted="$version $TE_VERSION $(cksum <"$packages")"
if [ -z "$given" ] && { [ ! -f "$known" ] || [ "$(cat "$known")" != "$wanted" ]; }; then
  say "1/3 downloading wheels for Python $version into $wheels (about 5 GB)"
  platforms=(--platform linux_x86_64 --platform manylinux1_x86_64 --platform manylinux2010_x86_64 --platform manylinux2014_x86_64)
  for minor in $(seq 5 35); do platforms+=(--platform "manylinux_2_${minor}_x86_64"); done # glibc 2.35: Ubuntu 22.04
  quietly "$log" "$python" -m pip --disable-pip-version-check --no-input download --only-binary=:all: \
    --python-version "$version" --implementation cp "${platforms[@]}" -d "$wheels" -r "$packages"
  NVTE_FRAMEWORK=pytorch quietly "$log" "$python" -m pip --disable-pip-version-check --no-input download --no-deps \
    --no-binary :all: --no-build-isolation -d "$wheels" "transformer_engine_torch==$TE_VERSION"
  printf '%s' "$wanted" >"$known"
fi

say "2/3 keeping the code for compute capability $arch"
packed="$out.packed" new="$out.new"
rm -rf "$packed" "$new"
mkdir -p "$packed" "$new"
: >"$packed/left_out"
for file in "$wheels"/*.whl "$wheels"/*.tar.gz; do
  [ -e "$file" ] || continue
  name="$(basename "$file")" left=""
  for pattern in ${leave_out[@]+"${leave_out[@]}"}; do
    # shellcheck disable=SC2254  # the pattern is one
    case "$name" in $pattern) left=1 ;; esac
  done
  if [ -n "$left" ]; then
    printf '%s\n' "$name" >>"$packed/left_out"
  elif [ "${name##*.}" = whl ]; then
    "$python" tools/one_gpu_only.py "$file" "$packed" --arch "$arch" ${without[@]+"${without[@]}"} >>"$log" 2>&1 ||
      fail "$(tail -n 1 "$log") (log: $log)" "download it again: remove $wheels, and run this again"
  else
    cp "$file" "$packed"
  fi
done
printf '%s\n' "$version" >"$packed/python"
printf '%s\n' "$arch" >"$packed/arch"

say "3/3 compressing $(du -sm "$packed" | cut -f 1) MB"
tar -C "$packed" -c . | xz -T0 -5 | split -b "${part_mb}MB" -d -a 3 - "$new/part-"
(cd "$new" && sha256sum part-* >SHA256SUMS)
rm -rf "$packed" "$out"
mv "$new" "$out"
say "wrote $(ls "$out"/part-* | wc -l) parts, $(du -sm "$out" | cut -f 1) MB, to $out"
say "on the other machine: bash scripts/install.sh --gpu --from DIR"
