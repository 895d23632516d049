#!/bin/bash
# One recipe as a job of Slurm:
#
#   sbatch THIS_FILE                 # in a folder that all nodes share: paths count from there
#   sbatch THIS_FILE runs/quickstart-ppo-12 # goes on with the run of job 12
#   scancel --batch --signal=INT JOB # ends the run after its step, with everything saved
#   scancel JOB                      # ends it at once; what was saved before stays
#
# `rolemesh` has to be on the PATH of the nodes. Before the time limit, and where a step is killed
# or a node fails, the job is queued again and goes on with its run.
# Made by: rolemesh render slurm recipes/quickstart-ppo.yaml --on=critic=1 --on=reference=1 --gpus=8 --notice=300
#SBATCH --job-name=quickstart-ppo
#SBATCH --nodes=2
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --gpus-per-node=8
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
#SBATCH --signal=B:USR1@300

set -u
umask 077

# sbatch hands the environment on. Models are folders, and nothing is fetched.
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 MALLOC_ARENA_MAX=2 PYTHONUNBUFFERED=1
run=${1:-runs/quickstart-ppo-$SLURM_JOB_ID}
run=${run%/}
ends= # Why the run is told to end: its time limit is near, or the job was cancelled.

bytes_of_steps() { stat -c %s "$run/metrics.jsonl" 2>/dev/null || echo 0; }
at_start=$(bytes_of_steps)

fail() {
    echo "error: $1"
    exit 1
}

# Queues the job again. One that makes no step between two starts would be queued without end.
again() { # WHY
    local by_hand="\`sbatch\` this file with $run goes on"
    if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] && [ "$(bytes_of_steps)" -le "$at_start" ]; then
        fail "$1, and no step was made since the job was queued again: see $run/logs; $by_hand"
    fi
    echo "$1: the job is queued again, and goes on with $run"
    scontrol requeue "$SLURM_JOB_ID" || fail "Slurm does not queue it again; $by_hand"
    sleep 600 # Slurm ends this shell.
    exit 1
}

ended() { # EXIT STATUS of the coordinator
    case $1/$ends in
    0/* | */cancelled) ;;
    */near) again "the time limit is near" ;;
    130/*) ;; # The run was told to end.
    129/* | 13?/* | 14?/*) again "the coordinator was killed ($1)" ;;
    esac
    # Under a new name, since services that have not ended yet may write there.
    mv "$run.mesh" "$run.mesh.old" 2>/dev/null
    rm -rf "$run.mesh.old"
    exit "$1"
}

own=$(mktemp -d) # Process and exit status of the coordinator, whose step is on this shell's node.
trap 'rm -rf "$own"' EXIT

# Ends the run after its step, with everything saved. Signals of Slurm go to services as well.
tell_to_end() {
    (
        until [ -s "$own/pid" ]; do sleep 1; done
        kill -TERM "$(<"$own/pid")"
    ) &
}
trap 'ends=near; tell_to_end' USR1
trap 'ends=cancelled; tell_to_end' INT
trap 'ends=cancelled' TERM # Of scancel, which ends all.

# Services of several nodes: members of one mesh, with an authority that signs for this start alone.
mesh=$run.mesh
rm -rf "$mesh" && mkdir -p "$mesh" "$run/logs" || fail "$run cannot be written"
rolemesh certs init "$mesh/certs" >/dev/null &&
    rolemesh certs issue "$mesh/certs" coordinator client/drive actor critic reference reward >/dev/null &&
    rm "$mesh/certs/authority.pem" || fail "no certificates could be made in $mesh"
export ROLEMESH_CERTIFICATES=$mesh/certs

# On each of several nodes of a service: they meet at the first one's address, at a port there.
on_hosts='
meet=$0.meet address=$(hostname)
if [ "$SLURM_PROCID" = 0 ]; then
    port=$((20000 + RANDOM % 12000))
    while (exec 3<>"/dev/tcp/$address/$port") 2>/dev/null; do port=$((20000 + RANDOM % 12000)); done
    echo "$address:$port" >"$meet.new"
    mv "$meet.new" "$meet"
fi
until [ -s "$meet" ]; do sleep 1; done
exec "$@" --host "$address" --hosts "$SLURM_NTASKS" --host-rank "$SLURM_PROCID" \
    --meet "$(<"$meet")"'

# One service. It takes a free port, and the same again when it is started again.
serve() { # NAME FIRST-NODE NODES GPUS SETTING...
    local name=$1 role=${1%%-*} node=$2 number=$3 gpus=$4 port=0
    local within=(env CUDA_VISIBLE_DEVICES=) listen=(--host 0.0.0.0)
    shift 4
    # Slurm says which GPUs of the node are the job's; the service gets those at these places.
    [ "$gpus" = none ] || within=(bash -c 'CUDA_VISIBLE_DEVICES=$(
        cut -d, -f"$0" <<<"${CUDA_VISIBLE_DEVICES:?Slurm gives this step no GPU}"
    ) exec "$@"' "$gpus")
    if [ "$number" -gt 1 ]; then
        within+=(bash -c "$on_hosts" "$mesh/$name")
        listen=()
    fi
    while true; do
        rm -f "$mesh/$name.meet"
        srun --overlap --nodes="$number" --ntasks="$number" --relative="$node" --cpu-bind=none \
            --job-name="$name" --output="$run/logs/$name.log" --open-mode=append \
            "${within[@]}" rolemesh serve "$role" "${listen[@]}" --port "$port" \
            --identity "$mesh/certs/$role.pem" --announce "$mesh/$name.json" --folder "$run" "$@"
        [ -s "$mesh/$name.address" ] || break
        port=$(sed 's/.*://' "$mesh/$name.address")
        echo "$name has ended, and is started again at port $port"
        sleep 1
    done
    touch "$mesh/$name.failed" 2>/dev/null # The folder is gone where the run has ended.
}

wait_for() { # NAME
    local deadline=$((SECONDS + 600))
    until [ -s "$mesh/$1.json" ]; do
        [ ! -e "$mesh/$1.failed" ] || fail "$1 does not start: see $run/logs/$1.log"
        [ "$SECONDS" -lt "$deadline" ] || fail "$1 is not ready after 600 s: see $run/logs/$1.log"
        sleep 1
    done
    sed 's/.*"address": "\([^"]*\)".*/\1/' "$mesh/$1.json" >"$mesh/$1.address"
}

serve actor 0 1 1,2,3,4,5,6,7,8 --layout pp=1,tp=1,dp=8,fsdp=8,order=tp-pp-dp --experience-capacity-bytes 1073741824 --folder=.models/SmolLM2-135M-Instruct &
serve critic 1 1 1,2,3,4 --layout pp=1,tp=1,dp=4,fsdp=4,order=tp-pp-dp --experience-capacity-bytes 1073741824 --folder=.models/SmolLM2-135M-Instruct &
serve reference 1 1 5,6,7,8 --layout pp=1,tp=1,dp=4,fsdp=4,order=tp-pp-dp --experience-capacity-bytes 1073741824 --folder=.models/SmolLM2-135M-Instruct &
serve reward 0 1 none --layout pp=1,tp=1,dp=1,fsdp=1,order=tp-pp-dp --experience-capacity-bytes 1073741824 &
wait_for actor
wait_for critic
wait_for reference
wait_for reward
export ROLEMESH_SERVICES__ACTOR__ADDRESS="$(<"$mesh/actor.address")"
export ROLEMESH_SERVICES__CRITIC__ADDRESS="$(<"$mesh/critic.address")"
export ROLEMESH_SERVICES__REFERENCE__ADDRESS="$(<"$mesh/reference.address")"
export ROLEMESH_SERVICES__REWARD__ADDRESS="$(<"$mesh/reward.address")"

(
    srun --overlap --nodes=1 --ntasks=1 --relative=0 --cpu-bind=none --job-name=coordinator \
        bash -c 'echo $$ >"$0"; exec "$@"' "$own/pid" env CUDA_VISIBLE_DEVICES= rolemesh train --restartable recipes/quickstart-ppo.yaml --set 'pools={critic: {devices: ['"'"'cuda:0'"'"', '"'"'cuda:1'"'"', '"'"'cuda:2'"'"', '"'"'cuda:3'"'"'], roles: [critic]}, reference: {devices: ['"'"'cuda:4'"'"', '"'"'cuda:5'"'"', '"'"'cuda:6'"'"', '"'"'cuda:7'"'"'], roles: [reference]}, actor: {devices: ['"'"'cuda:0'"'"', '"'"'cuda:1'"'"', '"'"'cuda:2'"'"', '"'"'cuda:3'"'"', '"'"'cuda:4'"'"', '"'"'cuda:5'"'"', '"'"'cuda:6'"'"', '"'"'cuda:7'"'"'], roles: [actor]}, reward: {devices: [cpu], roles: [reward]}}' --set critic.train.dp=4 --set reference.layout.dp=4 --set actor.train.dp=8 --out "$run"
    echo $? >"$own/code"
) &
coordinator=$!
# A signal interrupts `wait`. If the step ends at that moment, `wait` does not know its exit status.
until [ -s "$own/code" ] || ! kill -0 "$coordinator" 2>/dev/null; do wait "$coordinator"; done
code=$(cat "$own/code" 2>/dev/null)
ended "${code:-137}" # Without a status, what waited for the step was killed itself.
