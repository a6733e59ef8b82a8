# The body of both batch scripts: run on every node, and queue the job again while the run is not finished.
#
# Five minutes before its end (--signal), or when the machine is preempted, every process is told. The run then finishes
# its step, saves, and leaves with status 0; the requeued job goes on from there. A run that fails is not queued again.
#
#   DRAFTKV_LAUNCH   accelerate configuration (launch/accelerate/ddp.yaml)
#   DRAFTKV_VENV     environment (.venv)

source launch/install.sh  # names the environment; installs nothing
export PY DRAFTKV_LAUNCH="${DRAFTKV_LAUNCH:-launch/accelerate/ddp.yaml}"

# Also refuses a bad recipe before a machine is kept busy.
run="$(run_folder "$@")" || exit 2

DRAFTKV_MAIN_HOST="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
DRAFTKV_MAIN_PORT="$((20000 + SLURM_JOB_ID % 20000))"
export DRAFTKV_MAIN_HOST DRAFTKV_MAIN_PORT

srun --kill-on-bad-exit=1 bash launch/slurm/task.sh "$@"
if [ ! -f "$run/done.json" ]; then
    echo "slurm: $run is saved and not finished; queueing job $SLURM_JOB_ID again"
    scontrol requeue "$SLURM_JOB_ID"
fi
