#!/usr/bin/env bash
# The whole main job on a CPU: install, rollouts, distillation, export, report.
#
#   bash launch/quickstart.sh [key.sub=value ...]        overrides of recipes/quickstart.yaml
#
# Runs from any directory; results are in the repository's runs/quickstart/. Run it again at any time: each stage
# skips what is finished, goes on where it was stopped, and says so when the recipe changed.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/install.sh"

case "${1:-}" in -h | --help) sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit ;; esac

begin=$SECONDS
install embedded
times="$(printf '  %-10s %5d s' install $((SECONDS - begin)))"
cd "$ROOT"
recipe=recipes/quickstart.yaml
usage="$(mktemp)"
trap 'rm -f "$usage"' EXIT

# Also refuses a bad override before anything runs.
run="$(run_folder "$recipe" "$@")" || exit 2

# Runs a command and notes the largest memory that it or any process it started had, in MiB.
measured() {
    "$PY" - "$usage" "$@" <<'PYTHON'
import resource, signal, subprocess, sys
child = subprocess.Popen(sys.argv[2:], stdin=subprocess.DEVNULL)
signal.signal(signal.SIGINT, signal.SIG_IGN)  # the child gets it too, and saves
status = child.wait()
peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
with open(sys.argv[1], "a") as file:
    print(peak // (1024 * 1024 if sys.platform == "darwin" else 1024), file=file)
sys.exit(status if status >= 0 else 1)
PYTHON
}

stage() {
    local name="$1" start=$SECONDS status=0
    shift
    echo
    echo "== $name"
    measured "$@" || status=$?
    if [ $status -ne 0 ]; then
        echo "quickstart: '$name' ended with status $status; see above. The same command goes on from here." >&2
        exit $status
    fi
    times+="$(printf '\n  %-10s %5d s' "$name" $((SECONDS - start)))"
}

# Buffers of a step are large and come again: keep them instead of returning them to the kernel (glibc; measured on two
# cores: a training row in 5.0 s instead of 6.0 s).
export MALLOC_MMAP_THRESHOLD_=8589934592 MALLOC_TRIM_THRESHOLD_=17179869184 MALLOC_TOP_PAD_=268435456

# Given in full, so that a configuration of accelerate on this machine cannot change the quickstart.
accelerate=("$PY" -m accelerate.commands.launch --quiet --num_processes 1 --num_machines 1 --mixed_precision no
    --dynamo_backend no --num_cpu_threads_per_process "${OMP_NUM_THREADS:-$(getconf _NPROCESSORS_ONLN)}")
command -v nvidia-smi >/dev/null || accelerate+=(--cpu)

stage rollouts "$PY" data/rollouts.py "$recipe" "$@"
stage distill "${accelerate[@]}" train/distill.py "$recipe" "$@"
stage report "$PY" eval/report.py "$recipe" "$@"

echo
echo "== summary"
# The report's own summary: from its title to its first picture or second heading.
awk '/^!\[/ || (/^## / && ++headings > 2) { exit } { print }' "$run/report/report.md"
echo "time"
echo "$times"
printf '  %-10s %5d s\n' together $((SECONDS - begin))
echo "peak memory of one process: $(sort -n "$usage" | tail -n 1) MiB"
case "$run" in /*) ;; *) run="$ROOT/$run" ;; esac
echo "report:   $run/report/report.html  (and report.md)"
echo "drafter:  $run/export"
