#!/usr/bin/env bash
# slurm_array.sh on a real SLURM: munge, slurmctld and slurmd on this machine alone, in a temporary folder. A trial
# meets its time limit; an array of smoke trials is preempted, requeued, cancelled and submitted again, and in the end
# every result must equal that of a run that nobody disturbed. Three minutes on two cores; needs slurm-wlm
# and munge (Debian's names).
#
# Exit code: 0 all passed, 1 not, 77 skipped because SLURM or munge is not installed.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
unset -v "${!SLURM_@}" "${!SBATCH_@}" # this may be a job on a cluster
export OMP_NUM_THREADS=1 PATH=$PATH:/usr/sbin:/sbin
for program in munged slurmctld slurmd sbatch; do
    command -v "$program" >/dev/null || { echo "skipped: no $program (Debian: slurm-wlm, munge)" && exit 77; }
done
PYTHON=$(command -v "${PYTHON:-python}") || exit
export PYTHON
folder=$(mktemp -d) && logs=$folder/logs && failed=0
mkdir "$logs" "$folder/state" "$folder/spool" && chmod 755 "$folder"

cleanup() {
    ((failed == 0)) || tail -n 5 "$logs"/*
    for process in /proc/[0-9]*; do # the daemons, and what they left
        grep -qszx "SLURM_CONF=$folder/slurm.conf" "$process/environ" && kill -KILL "${process#/proc/}"
    done
    kill "$(cat "$folder/munge.pid")"
    rm -rf "$folder"
} 2>/dev/null
trap cleanup EXIT
trap 'exit 1' INT TERM

# A cluster of three CPUs, two for trials and one for a job that sleeps, and partitions that differ in preemption.
# A requeued job waits for cred_expire.
port=$((20000 + $$ % 20000))
printf '%s\n' >"$folder/slurm.conf" ClusterName=test "SlurmctldHost=$(hostname -s)(127.0.0.1)" \
    SlurmctldPort=$port SlurmdPort=$((port + 1)) SlurmUser="$(id -un)" SlurmdUser="$(id -un)" \
    StateSaveLocation="$folder/state" SlurmctldPidFile="$folder/slurmctld.pid" SlurmctldLogFile="$logs/slurmctld" \
    SlurmdSpoolDir="$folder/spool" SlurmdPidFile="$folder/slurmd.pid" SlurmdLogFile="$logs/slurmd" \
    AuthInfo="socket=$folder/munge.socket,cred_expire=5" SlurmdParameters=config_overrides KillWait=10 MinJobAge=7200 \
    ProctrackType=proctrack/linuxproc TaskPlugin=task/none MpiDefault=none SelectType=select/cons_tres \
    SelectTypeParameters=CR_CPU PreemptType=preempt/partition_prio PreemptMode=REQUEUE \
    SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1 \
    "NodeName=node NodeAddr=127.0.0.1 CPUs=3 State=UNKNOWN" "PartitionName=requeued Nodes=node PriorityTier=1" \
    "PartitionName=cancelled Nodes=node PriorityTier=1 PreemptMode=CANCEL" \
    "PartitionName=urgent Nodes=node PriorityTier=2 PreemptMode=OFF Default=YES"
(umask 077 && head -c 1024 /dev/urandom >"$folder/munge.key")
munged --key-file="$folder/munge.key" --seed-file="$folder/munge.seed" --log-file="$logs/munge" \
    --socket="$folder/munge.socket" --pid-file="$folder/munge.pid" || exit
export SLURM_CONF=$folder/slurm.conf
slurmctld && slurmd -N node || exit

check() { # WHAT CONDITION...
    "${@:2}" && echo "passed ($SECONDS s): $1" && return
    echo "FAILED ($SECONDS s): $1" && failed=1
}
soon() { # SECONDS CONDITION...: it comes true within these seconds
    for ((end = SECONDS + $1; SECONDS < end; )); do "${@:2}" && return || sleep 0.2; done
    return 1
}
field() { [[ " $(scontrol show job --oneliner "$1") " =~ " $2="([^ ]*) ]] && echo "${BASH_REMATCH[1]}"; }
is() { [[ $(field "$1" "$2") == "$3" ]]; }
says() { grep -qs -- "$2" "$logs/$1"; }
waits() { [[ -s $logs/$1 ]] && is "$1" JobState RUNNING && ! says "$1" "it/s"; }
ended() { [[ -z $(squeue --noheader --jobs="$1" 2>/dev/null) ]]; }
flags=(fig2 --scale smoke --save-every 50 --log-every 50) # 12 trials of five to fifteen seconds
submit() { sbatch --parsable --output="$logs/%A_%a" "$@" slurm_array.sh reverse.py "${flags[@]}" "${more[@]}"; }
preempt() { sbatch --wait --partition=urgent --cpus-per-task=3 --output=/dev/null --wrap=true >/dev/null; }
two_train() { # elements of array $1 in the first half of their training -> now
    now=()
    for n in $(squeue --noheader --states=RUNNING --jobs="$1" --format=%K); do
        [[ $(tail -n 1 "$logs/$1_$n" 2>/dev/null) =~ \ ([1-9][0-9]{1,2})/ ]] && now+=("$n")
    done
    ((${#now[@]} == 2))
}
requeued() { # those of $now once, the others of array $1 never
    for n in {0..11}; do is "$1_$n" Restarts "$([[ " ${now[*]} " == *" $n "* ]] && echo 1 || echo 0)" || return; done
}
states_are() { for n in {0..11}; do [[ $(field "$1_$n" JobState) =~ ^($2)$ ]] || return; done; }

soon 30 eval '[[ $(sinfo --noheader --partition=urgent --format=%T) == idle ]]' || exit
more=(--iterations 10000000 --out "$folder/endless")
beyond=$(submit --array=12) && first=$(submit --array=0)
check "index beyond the list: exit code 2" soon 60 is "${beyond}_12" ExitCode 2:0
check "an element trains" soon 60 says "${first}_0" "it/s"
second=$(submit --array=0)
check "another element of the same trial waits" soon 60 waits "${second}_0"
scancel "$first"
check "... and trains when the first was cancelled" soon 60 says "${second}_0" "it/s"
scancel "$second"
more[3]=$folder/limited
limited=$(submit --array=0 --time=1 --signal=B:USR1@59) # when SLURM next checks time limits, every 30 s
check "at its time limit an element requeues itself" soon 120 is "${limited}_0" Restarts 1
check "... and continues" soon 60 says "${limited}_0" "at iteration [1-9]"
scancel "$limited"

more=(--iterations 2000 --out "$folder/undisturbed")
"$PYTHON" reverse.py --all "${flags[@]}" "${more[@]}" --jobs 2 >"$logs/undisturbed" 2>&1
check "undisturbed" test $? = 0
more[3]="$folder/it's disturbed"
a=$(submit --array=0-11%2 --partition=requeued)
check "array: two elements train" soon 60 two_train "$a"
preempt
check "preempted, PreemptMode=REQUEUE: both are requeued by SLURM, no other" requeued "$a"
soon 60 two_train "$a"
scancel "$a"
check "cancelled: all elements end" soon 60 ended "$a"
check "... and none came back" states_are "$a" "COMPLETED|CANCELLED"
b=$(submit --array=0-11%2 --partition=cancelled)
check "submitted again: two elements train" soon 60 two_train "$b"
preempt
check "preempted, PreemptMode=CANCEL: both requeue themselves, no other" requeued "$b"
check "all elements end" soon 400 ended "$b"
check "... as COMPLETED" states_are "$b" COMPLETED
check "every result equals the undisturbed one" "$PYTHON" - "$folder" <<'PROGRAM'
import sys
from pathlib import Path
from test_all import outcome

one, two = (Path(sys.argv[1], name) for name in ("undisturbed", "it's disturbed"))
trials = [path.parent.relative_to(one) for path in one.rglob("result.json")]
raise SystemExit(len(trials) != 12 or any(outcome(one / x) != outcome(two / x) for x in trials))
PROGRAM
exit "$failed"
