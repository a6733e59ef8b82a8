#!/usr/bin/env bash
# Serves a recipe's target with vLLM, for data/rollouts.py and data/signals.py with engine.kind=server.
#
#   bash launch/serve_target.sh RECIPE [key.sub=value ...]        e.g. engine.url=http://127.0.0.1:8123
#
# Address, names, limits and vLLM's options come from the recipe (`engine`). Another machine reaches it if engine.url
# names this one. Needs both environments (launch/install.sh, launch/engine_env.sh); Ctrl-C ends it.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/engine_env.sh"

case "${1:-}" in "" | -h | --help) sed -n '2,7s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit ;; esac
[ -x "$PY" ] || stop "no Python in $VENV; run: bash launch/install.sh"
[ -n "${DRAFTKV_ENGINE_PYTHON:-}" ] || { [ -x "$ENGINE_PY" ] && export DRAFTKV_ENGINE_PYTHON="$ENGINE_PY"; } || true

export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
text="$("$PY" -m draftkv.teacher.engines.serve "$@")" || exit 2
mapfile -t command <<<"$text"
unset PYTHONPATH
# As in draftkv.teacher.engines.serve, for a process that the shell starts.
export VLLM_NO_USAGE_STATS=1
command -v nvidia-smi >/dev/null || export VLLM_CPU_KVCACHE_SPACE="${VLLM_CPU_KVCACHE_SPACE:-2}"
echo "serve: ${command[*]}"
exec "${command[@]}"
