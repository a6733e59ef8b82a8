#!/usr/bin/env bash
# Installs, then runs the tests; needs no network after that.
#
#   bash launch/test.sh [arguments of pytest]        e.g. tests/parity -k gemma3 -x
#
# Without arguments: ruff, and every test in DRAFTKV_TEST_PROCESSES processes of one thread each (2).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/install.sh"

install test
cd "$ROOT"
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TOKENIZERS_PARALLELISM=false
if [ $# -eq 0 ]; then
    echo "test: ruff"
    "$PY" -m ruff check .
    set -- -n "${DRAFTKV_TEST_PROCESSES:-2}" --dist worksteal
fi
echo "test: pytest $*"
begin=$SECONDS status=0
"$PY" -m pytest "$@" || status=$?
case $status in
    0) echo "test: all passed in $((SECONDS - begin)) s ($("$PY" --version), $VENV)" ;;
    5) echo "test: pytest found no test to run" ;;
    *) echo "test: FAILED after $((SECONDS - begin)) s; one test again: bash launch/test.sh PATH::NAME -x" ;;
esac
exit $status
