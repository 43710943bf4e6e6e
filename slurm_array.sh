#!/usr/bin/env bash
# Run one trial per task of a SLURM job array. From the suite's folder, with its Python environment active:
#
#     sbatch --array=0-179 slurm_array.sh reverse.py fig2                         # all trials of Fig. 2
#     sbatch --array=0-11 slurm_array.sh reverse.py fig2 --scale smoke --out DIR  # flags go to every trial
#
# Array task n runs `python reverse.py --all fig2 --index n`: line n, counted from 0, of `--list fig2`. Pass time limit,
# partition, GPU and account to sbatch before the script's name; set PYTHON to use another interpreter. A task that
# reaches its time limit (USR1 two minutes earlier) or is preempted (TERM) saves a checkpoint, exits with 75 and requeues
# itself. A task cancelled with scancel saves, but is not requeued; submit the same command again to resume it. For
# bitwise identical results, use the same --cpus-per-task throughout.
#
# Exit codes: 0 done, 1 failed (disk, memory), 2 invalid flags, 3 training diverged, 73 folder in use by another process
# or deleted, 75 interrupted (run again to resume)
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%A_%a.out

[[ $# -gt 0 ]] || { echo "usage: sbatch --array=0-N slurm_array.sh SCRIPT FIGURE [FLAGS]" >&2 && exit 2; }

# Requeue this array task if the output of `scontrol show job` matches the regular expression $1. With hundreds of tasks
# calling at once, the controller may not answer, so try up to 20 times. The task is named JOB_INDEX, since
# SLURM_JOB_ID can refer to the whole array. The patterns below match neither cancelled tasks nor tasks that SLURM has
# already requeued.
requeue_if() {
    task=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
    for _ in {1..20}; do
        if job=$(timeout 20 scontrol show job --oneliner "$task"); then
            [[ $job =~ $1 ]] || return 0
            timeout 20 scontrol requeue "$task" && return
        fi
        sleep 10
    done
    requeue_failed=yes
    echo "slurm_array.sh: could not requeue $task in 20 tries; submit it again to resume" >&2
}

# Only this shell receives USR1, and bash runs traps only between commands or in `wait`, so Python runs in the
# background. SLURM sends TERM to all processes and kills them KillWait (30 seconds) later, so the trap requeues the task
# at once instead of waiting for Python.
stop() { stopped=yes && kill -TERM $! 2>/dev/null; }
trap stop USR1 INT HUP
trap 'stop; requeue_if "JobState=COMPLETING.*( Reason=TimeLimit| PreemptTime=[0-9])"' TERM
while true; do
    "${PYTHON:-python}" "$1" --all "${@:2}" --index "$SLURM_ARRAY_TASK_ID" &
    if [[ $stopped ]]; then stop; fi # the signal arrived before Python was started
    while kill -0 $! 2>/dev/null; do wait $!; done # a signal ends `wait` early
    wait $!
    code=$?
    [[ $code == 73 && $SECONDS -lt 60 ]] || break # a cancelled task may still be saving this trial
    sleep 10 &
    wait $! || { code=75 && break; }
done
if [[ $code == @(129|138|143) ]]; then # a signal arrived before Python handled signals
    code=75
    echo "slurm_array.sh: stopped; run the same command again to resume" >&2
fi
trap 'exit "$code"' TERM
if [[ $code == 75 && ! $requeue_failed ]]; then requeue_if "JobState=RUNNING "; fi
exit "$code"
