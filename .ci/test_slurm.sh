#!/usr/bin/env bash
# slurm_array.sh on a real SLURM: munge, slurmctld and slurmd on this machine alone, in a temporary folder, beside
# whatever /etc/slurm says. Arrays of smoke trials are preempted, timed out, requeued, killed, cancelled and submitted
# again; in the end every result must equal that of a run that nobody disturbed.
#
#     PYTHON=python .ci/test_slurm.sh    # five minutes on two busy cores; needs slurm-wlm and munge (Debian's names)
#
# Exit code: 0 all passed, 1 not, 77 skipped because SLURM or munge is not installed.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
unset -v "${!SLURM_@}" "${!SBATCH_@}" # this may be a job on a cluster
export OMP_NUM_THREADS=1
export PATH=$PATH:/usr/sbin:/sbin
for program in munged slurmctld slurmd sbatch; do
    command -v "$program" >/dev/null || { echo "skipped: no $program (Debian: slurm-wlm, munge)" && exit 77; }
done
PYTHON=$(command -v "${PYTHON:-python}") || exit # a path: below, `python` is a function that calls it
export PYTHON

folder=$(mktemp -d) && logs=$folder/logs && passed=0 failed=0
iterations=1500 # of each trial, five to fifteen seconds: long enough to be interrupted
flags=(fig2 --scale smoke --iterations "$iterations" --save-every 50 --log-every 50)
mkdir "$logs" "$folder/state" "$folder/spool"
chmod 755 "$folder"

kill_with() { # all processes that were started with this environment variable
    for process in /proc/[0-9]*; do
        if grep -qszx "$1" "$process/environ"; then kill -KILL "${process#/proc/}"; fi
    done
}

cleanup() {
    ((failed == 0)) || tail -n 6 "$logs"/*
    kill_with "SLURM_CONF=$folder/slurm.conf" # the daemons, and what they left
    kill "$(cat "$folder/munge.pid")"
    rm -rf "$folder"
} 2>/dev/null
trap cleanup EXIT
trap 'exit 1' INT TERM

# ---------------------------------------------------------------------------------------------------------------
# A cluster: three CPUs (two for trials, one for a job that sleeps), four partitions that differ in preemption
# ---------------------------------------------------------------------------------------------------------------

start_cluster() {
    port=$((20000 + $$ % 20000))
    cat >"$folder/slurm.conf" <<CONF
ClusterName=test
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmctldPort=$port
SlurmdPort=$((port + 1))
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
AuthInfo=socket=$folder/munge.socket,cred_expire=5  # a requeued job waits this long
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$logs/slurmctld
SlurmdLogFile=$logs/slurmd
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
KillWait=10
MinJobAge=7200
NodeName=node NodeAddr=127.0.0.1 CPUs=3 State=UNKNOWN
PartitionName=requeued Nodes=node PriorityTier=1
PartitionName=cancelled Nodes=node PriorityTier=1 PreemptMode=CANCEL
PartitionName=urgent Nodes=node PriorityTier=2 PreemptMode=OFF Default=YES
CONF
    (umask 077 && head -c 1024 /dev/urandom >"$folder/munge.key")
    munged --key-file="$folder/munge.key" --seed-file="$folder/munge.seed" --log-file="$logs/munge" \
        --socket="$folder/munge.socket" --pid-file="$folder/munge.pid" || exit 1
    export SLURM_CONF=$folder/slurm.conf
    slurmctld && slurmd -N node && soon 30 node_is_idle || exit 1
}

node_is_idle() { [[ $(sinfo --noheader --partition=urgent --format=%T) == idle ]]; }

check() { # WHAT CONDITION...
    if "${@:2}"; then
        passed=$((passed + 1)) verdict=passed
    else
        failed=$((failed + 1)) verdict=FAILED
    fi
    echo "$verdict ($SECONDS s): $1"
}

soon() { # SECONDS CONDITION...: whether it comes true within these seconds
    for ((end = SECONDS + $1; SECONDS < end; )); do
        if "${@:2}"; then return; fi
        sleep 0.2
    done
    return 1
}

submit() { sbatch --parsable --output="$logs/%A_%a" "$@"; }
field() { [[ " $(scontrol show job --oneliner "$1") " =~ " $2="([^ ]*) ]] && echo "${BASH_REMATCH[1]}"; }
is() { [[ $(field "$1" "$2") == "$3" ]]; }
not() { ! "$@"; }
says() { grep -qs -- "$2" "$logs/$1"; }
ended() { left=$(squeue --noheader --jobs="$1" 2>/dev/null) && [[ -z $left ]]; }
preempt() { sbatch --wait --partition=urgent --cpus-per-task=3 --output=/dev/null --wrap=true >/dev/null; }

training() { # elements of array $1 that are in the first half of their training
    for n in $(squeue --noheader --states=RUNNING --jobs="$1" --format=%K); do
        if [[ $(tail -n 1 "$logs/$1_$n" 2>/dev/null) =~ ^iteration\ ([0-9]+)/ ]]; then
            ((BASH_REMATCH[1] > iterations / 2)) || echo "$n"
        fi
    done
}

some_train() { mapfile -t now < <(training "$1") && ((${#now[@]} >= $2)); } # ARRAY HOW_MANY -> now

each() { # FIELD of each of the 12 elements of ARRAY
    for n in {0..11}; do field "$2_$n" "$1"; done | tr '\n' ' '
}

# ---------------------------------------------------------------------------------------------------------------
# Undisturbed, and meanwhile: a Python that never stops, an index too high, a trial that another element still has
# ---------------------------------------------------------------------------------------------------------------

start_cluster
cat >"$folder/stubborn" <<'PROGRAM'
#!/usr/bin/env bash
if [[ $2 == --list ]]; then echo "python $1" && exit; fi
trap '' TERM
if [[ $SLURM_RESTART_COUNT ]]; then exit 0; fi
while true; do sleep 1; done
PROGRAM
chmod 755 "$folder/stubborn"

stubborn=$(PYTHON=$folder/stubborn submit --array=0 --time=1 --signal=B:USR1@20 slurm_array.sh reverse.py)
beyond=$(submit --array=12 slurm_array.sh reverse.py "${flags[@]}")
endless() { submit --array=0 slurm_array.sh reverse.py "${flags[@]}" --iterations 10000000 --out "$folder/twice"; }
first=$(endless)
python() { "$PYTHON" "$@"; }
export -f python
python reverse.py --list "${flags[@]}" --out "$folder/undisturbed" | xargs -P 2 -d '\n' -n 1 bash -c \
    >"$logs/undisturbed" 2>&1 &
undisturbed=$!
soon 100 some_train "$first" 1
second=$(endless)

check "index beyond the list: exit code 2" soon 60 is "${beyond}_12" ExitCode 2:0
check "... and a line that says how many there are" says "${beyond}_12" "^slurm_array.sh: error: no trial 12: .* has 12 "
check "trial that another element still has: waits" soon 60 says "${second}_0" "is being run by process"
scancel "$first"
check "... and continues it once the other was cancelled" soon 60 says "${second}_0" "continuing"
scancel "$second"
check "not stopped at the time limit: killed, requeued, continued" soon 200 is "${stubborn}_0" JobState COMPLETED
check "... at the limit, not before" says "${stubborn}_0" "DUE TO TIME LIMIT"
check "... once" is "${stubborn}_0" Restarts 1
check "undisturbed run of every line of --list" wait "$undisturbed"

# ---------------------------------------------------------------------------------------------------------------
# The same trials as an array: preempted, requeued, killed, cancelled; again: preempted, timed out; and once more
# ---------------------------------------------------------------------------------------------------------------

array() { submit "$@" slurm_array.sh reverse.py "${flags[@]}" --out "$folder/it's disturbed"; }

all_restarts_are() { # ARRAY COUNT ELEMENTS...: these elements restarted that often, the others never
    for n in {0..11}; do
        if [[ " ${*:3} " == *" $n "* ]]; then is "$1_$n" Restarts "$2" || return; else is "$1_$n" Restarts 0 || return; fi
    done
}

states_are() { # ARRAY PATTERN
    for n in {0..11}; do [[ $(field "$1_$n" JobState) =~ ^($2)$ ]] || return; done
}

a=$(array --array=0-11%2 --partition=requeued)
check "array: two elements train" soon 60 some_train "$a" 2
preempt
check "preempted, PreemptMode=REQUEUE: both requeued by SLURM, once, and no other" all_restarts_are "$a" 1 "${now[@]}"
soon 60 some_train "$a" 1
before=$(field "${a}_${now[0]}" Restarts)
check "scontrol requeue of one" scontrol requeue "${a}_${now[0]}"
check "... counts" soon 30 is "${a}_${now[0]}" Restarts $((before + 1))
soon 60 some_train "$a" 1
kill_with "SLURM_JOB_ID=$(field "${a}_${now[0]}" JobId)"
check "killed: has failed" soon 30 is "${a}_${now[0]}" JobState FAILED
soon 60 some_train "$a" 1
scancel "$a"
check "cancelled: all elements end" soon 60 ended "$a"
check "... and none came back" states_are "$a" "COMPLETED|FAILED|CANCELLED"
for n in "${now[@]}"; do check "... element $n that trained" is "${a}_$n" JobState CANCELLED; done
echo "restarts of each element: $(each Restarts "$a")"

b=$(array --array=0-11%2 --partition=cancelled --signal=B:USR1@59)
check "array again: two elements train" soon 60 some_train "$b" 2
preempt
check "preempted, PreemptMode=CANCEL: both requeue themselves, once, and no other" all_restarts_are "$b" 1 "${now[@]}"
scontrol update JobId="$b" TimeLimit=1 # so USR1 comes at SLURM's next look at the clock, every 30 seconds
check "time limit of a minute: all elements end" soon 400 ended "$b"
check "... as COMPLETED" soon 30 states_are "$b" COMPLETED
counts=$(each Restarts "$b")
echo "restarts of each element: $counts; states: $(each JobState "$b")"
check "... some of them requeued at the limit" test $((${counts// /+}0)) -gt 2

c=$(array --array=0-11:5)
check "array once more: every element ends" soon 60 ended "$c"
for n in 0 5 10; do check "... at once, trial $n" says "${c}_$n" "is finished"; done

# ---------------------------------------------------------------------------------------------------------------
# A controller that never answers: of two elements the first one's scontrol hangs, the second one's fails
# ---------------------------------------------------------------------------------------------------------------

mkdir "$folder/silent"
fake() { echo "#!/bin/sh" | cat - <(echo "$2") >"$folder/silent/$1" && chmod 755 "$folder/silent/$1"; }
fake scontrol "[ \$SLURM_ARRAY_TASK_ID = 1 ] || exec $(command -v sleep) 1000; exit 1"
fake timeout "shift; exec $(command -v timeout) .1 \"\$@\"" # for seconds
fake sleep "exec $(command -v sleep) .1"
d=$(PATH=$folder/silent:$PATH submit --array=0-1 slurm_array.sh reverse.py "${flags[@]}" --iterations 10000000 \
    --out "$folder/unanswered")
for n in 0 1; do soon 60 says "${d}_$n" "^iteration"; done
scancel --batch --signal=USR1 "$d"
for n in 0 1; do
    check "scontrol that $( ((n)) && echo fails || echo hangs): element ends, exit code 75" soon 60 is "${d}_$n" ExitCode 75:0
    check "... saved" says "${d}_$n" "stopped at iteration"
    check "... and a line that says so" says "${d}_$n" "^slurm_array.sh: scontrol has not requeued ${d}_$n in 20 tries"
done

# ---------------------------------------------------------------------------------------------------------------
# The results
# ---------------------------------------------------------------------------------------------------------------

compare() { # prints a line per trial: its verdict and its folder
    "$PYTHON" - "$folder" "$logs"/{"$a","$b"}_* <<'PROGRAM'
import collections, json, re, sys
from pathlib import Path
import torch

folder, logs = Path(sys.argv[1]), sys.argv[2:]

def curve(trial):
    return [line.rsplit(",", 1)[0] for line in (trial / "curve.csv").read_text().splitlines()]

def metrics(trial):
    return json.loads((trial / "result.json").read_text())["metrics"]

def weights(trial):
    return torch.load(trial / "last.pt", weights_only=True)["model"]

for result in sorted((folder / "undisturbed").rglob("result.json")):
    one = result.parent
    name = one.relative_to(folder / "undisturbed")
    two = folder / "it's disturbed" / name
    same = curve(one) == curve(two) and len(curve(one)) > 1 and metrics(one) == metrics(two)
    one, two = weights(one), weights(two)
    same = same and one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one)
    print("same" if same else "different", name)

history = collections.defaultdict(str)  # of each element, over both arrays
for log in logs:
    history[log.split("_")[-1]] += Path(log).read_text()
stops = lost = 0
for text in history.values():
    events = re.findall(r"(stopped|continuing).* iteration (\d+)", text)
    for (what, at), (_, then) in zip(events, events[1:]):
        stops += what == "stopped"
        lost += what == "stopped" and then != at
print("same" if stops and not lost else "different", f"iteration after each of {stops} stops, in {len(history)} trials")
PROGRAM
}

check "no trial was found running elsewhere" not grep -q "being run by process" "$logs"/{"$a","$b"}_*
compared=0
while read -r verdict what; do
    check "same as undisturbed: $what" test "$verdict" = same
    compared=$((compared + 1))
done < <(compare)
check "all 12 trials compared" test $compared = 13

echo "$passed passed, $failed failed"
((failed == 0))
