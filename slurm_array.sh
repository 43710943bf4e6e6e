#!/usr/bin/env bash
# One trial per element of a SLURM job array. From the suite's folder, with its Python environment active:
#
#     sbatch --array=0-179 slurm_array.sh reverse.py fig2                         # all trials of Fig. 2
#     sbatch --array=0-11 slurm_array.sh reverse.py fig2 --scale smoke --out DIR  # flags go to every trial
#
# Element n runs `python reverse.py --all fig2 --index n`: line n, counted from 0, of `--list fig2`. Time limit,
# partition, GPU and account belong before the script's name; PYTHON names another interpreter. An element that meets
# its time limit (USR1 two minutes before) or is preempted (TERM) saves, exits with 75 and goes back to the queue, alone;
# one that scancel ends saves and stays out of it: the same line again continues it. Bitwise identical results need the same
# --cpus-per-task throughout.
#
# Exit codes: 0 done, 1 failed (disk, memory), 2 invalid flags, 3 training diverged, 73 in use by another process, 75
# interrupted (run again to resume)
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%A_%a.out

[[ $# -gt 0 ]] || { echo "use: sbatch --array=0-N slurm_array.sh SCRIPT FIGURE [FLAGS]" >&2 && exit 2; }

# Back to the queue if `scontrol show job` says what $1 matches. A controller that hears from hundreds of elements at
# once may not answer: it is asked again, 20 times at most. The name is JOB_INDEX: the job's own number can be
# the whole array's. No pattern below matches a job that its user cancelled, or that SLURM has requeued itself.
requeue_if() {
    element=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
    for _ in {1..20}; do
        if job=$(timeout 20 scontrol show job --oneliner "$element"); then
            [[ $job =~ $1 ]] || return 0
            timeout 20 scontrol requeue "$element" && return
        fi
        sleep 10
    done
    unanswered=yes
    echo "slurm_array.sh: scontrol has not requeued $element in 20 tries; submitted again, it continues" >&2
}

# Only this shell gets USR1, and bash runs a trap only while it waits: hence the `&`. TERM goes to all processes, and
# all are killed KillWait (30 seconds) later, even if Python is not done by then: so it requeues first.
stop() { stopped=yes && kill -TERM $! 2>/dev/null; }
trap stop USR1 INT HUP
trap 'stop; requeue_if "JobState=COMPLETING.*( Reason=TimeLimit| PreemptTime=[0-9])"' TERM
while true; do
    "${PYTHON:-python}" "$1" --all "${@:2}" --index "$SLURM_ARRAY_TASK_ID" &
    [[ ! $stopped ]] || stop # it was too early for Python
    while kill -0 $! 2>/dev/null; do wait $!; done # a signal ends `wait` early
    wait $!
    code=$?
    [[ $code == 73 && $SECONDS -lt 60 ]] || break # running elsewhere: a cancelled element may still be saving
    sleep 10 &
    wait $! || { code=75 && break; }
done
if [[ $code == @(129|138|143) ]]; then # a signal came before Python listened
    code=75
    echo "slurm_array.sh: stopped; the same command continues" >&2
fi
trap 'exit "$code"' TERM
[[ $code != 75 || $unanswered ]] || requeue_if "JobState=RUNNING "
exit "$code"
