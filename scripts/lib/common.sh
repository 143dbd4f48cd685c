# Shell helpers of scripts/*.sh: one clear sentence for every failure, and quiet commands with their output in a log.

say() { printf '%s\n' "$*"; }

# absolute DIR: resolves DIR from $caller, the directory in which the script was called.
absolute() { case "$1" in /*) printf '%s' "$1" ;; *) printf '%s' "$caller/$1" ;; esac; }

# fail SENTENCE HINT: the only exit for failures of these scripts.
fail() {
  printf 'error: %s\n  hint: %s\n' "$1" "$2" >&2
  exit 1
}

# find_python: prints a Python that can run mslime; otherwise fails and names the Python found.
find_python() {
  local candidate version found=""
  for candidate in ${PYTHON:-python3.11 python3.12 python3}; do
    version="$("$candidate" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null)" || continue
    case "$version" in
      3.11.* | 3.12.*) command -v "$candidate" && return 0 ;;
      *) found="$found $candidate is $version," ;;
    esac
  done
  fail "mslime needs Python 3.11 or 3.12;${found:- no Python was found,} which is not supported" \
    "install Python 3.11, or set PYTHON to one: PYTHON=/path/to/python3.11 bash scripts/install.sh"
}

# need_disk DIRECTORY GIB: fails when the file system of DIRECTORY has less than GIB free.
need_disk() {
  local directory="$1" wanted="$2" free
  while [ ! -d "$directory" ]; do directory="$(dirname "$directory")"; done
  free="$(df -Pk "$directory" | awk 'NR == 2 { printf "%d", $4 / 1048576 }')"
  [ "$free" -ge "$wanted" ] || fail "the disk of $directory has $free GiB free, and the installation needs $wanted" \
    "free some space, or install elsewhere with --venv DIR"
}

# explain_pip LOG: turns the end of a failed pip log into a sentence.
explain_pip() {
  if grep -qi 'no space left' "$1"; then
    fail "the disk filled up during the installation (log: $1)" "free some space and run this again; it starts over cleanly"
  elif grep -qiE 'connection (broken|refused|aborted|reset)|name resolution|timed out|SSLError|ProxyError|HTTP error|from versions: none' "$1"; then
    fail "a package could not be downloaded: $(last_error "$1") (log: $1)" \
      "check the network, the proxy settings and pip's index (pip config list), then run this again"
  elif grep -qiE 'no matching distribution|could not find a version' "$1"; then
    fail "the package index lacks a version that mslime pins: $(last_error "$1") (log: $1)" \
      "check pip's index (pip config list): it must offer the versions in pyproject.toml"
  elif grep -qiE 'permission denied|read-only file system|cannot update time stamp' "$1"; then
    fail "pip could not write: $(last_error "$1") (log: $1)" \
      "copy the checkout to a directory of your own and run the script there: pip writes mslime.egg-info beside it"
  fi
  fail "pip failed: $(last_error "$1") (log: $1)" "read the log; running this again starts over cleanly"
}

# last_error LOG: the last error in a pip log.
last_error() {
  grep -iE '^ *(error|fatal)' "$1" | grep -v 'subprocess-exited-with-error' | tail -n 1 | sed -E 's/^ *(ERROR|error): *//' | cut -c 1-240
}

# quietly LOG COMMAND...: output into the log; a pip failure is explained.
quietly() {
  local log="$1"
  shift
  printf '\n$ %s\n' "$*" >>"$log"
  "$@" >>"$log" 2>&1 || explain_pip "$log"
}

# check_imports VENV MODE: imports the modules of a run; the first failure is shown with its own message.
check_imports() {
  local venv="$1" modules=(torch megatron.core ray transformers mslime)
  [ "$2" = cpu ] || modules+=(transformer_engine.pytorch sglang.srt.server_args fla.ops.gated_delta_rule)
  printf '\n$ imports %s\n' "${modules[*]}" >>"$venv/install.log"
  "$venv/bin/python" -W ignore scripts/lib/imports.py "${modules[@]}" >"$venv/imports.log" 2>>"$venv/install.log" ||
    fail "$(tail -n 1 "$venv/imports.log") (log: $venv/install.log)" \
      "run this again; if the same import fails, remove $venv and install again"
}
