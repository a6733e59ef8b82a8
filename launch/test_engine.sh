#!/usr/bin/env bash
# Runs the tests that need a serving engine (vLLM); on a CPU too, in about ten minutes.
#
#   bash launch/test_engine.sh [arguments of pytest]
#
# Makes both environments first (launch/install.sh, launch/engine_env.sh); another engine's Python may be named in
# DRAFTKV_ENGINE_PYTHON.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/engine_env.sh"

install test
if [ -z "${DRAFTKV_ENGINE_PYTHON:-}" ]; then
    install_engine
    export DRAFTKV_ENGINE_PYTHON="$ENGINE_PY"
fi
cd "$ROOT"
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TOKENIZERS_PARALLELISM=false
exec "$PY" -m pytest -m engine tests/engine "$@"
