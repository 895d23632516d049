"""A batch script of Slurm: one recipe on one node, or its services spread over several.

On one node `rolemesh train` starts the services itself. On several, each service is a step of its
own, also one whose ranks lie on several nodes, and the coordinator's step on the first node gets
their addresses once they have announced them.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rolemesh.coordinator.recipe.errors import RecipeError
from rolemesh.coordinator.recipe.role_names import kind_of, role_of
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.recipe.service_flags import service_flags
from rolemesh.coordinator.render.nodes import address_setting, check_nodes, given_addresses
from rolemesh.coordinator.render.placement import gpus_of

_WORD = re.compile(r"^[\w.,:+@=/-]+$", re.ASCII)

_TIME = re.compile(r"^(?:(?P<days>\d+)-)?(?P<parts>\d+(?::\d+){0,2})$", re.ASCII)
"""Minutes, minutes:seconds, hours:minutes:seconds, days-hours, and so on to days-h:m:s."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmOptions:
    """What the job asks Slurm for, beside nodes and GPUs."""

    partition: str | None = None
    account: str | None = None
    time: str | None = None
    """Time limit as sbatch writes it; None: that of the partition."""
    interface: str | None = None
    """Network interface by which nodes of one service reach each other; None: what their host names
    lead to."""
    notice_s: int = 300
    """Seconds before the time limit at which the run is told to save."""
    setup: Sequence[str] = ()
    """Commands of a shell before anything else, e.g. one that activates an environment."""


def _check_options(options: SlurmOptions) -> None:
    """Raises RecipeError for what sbatch would not take, or would read as something else."""
    for name in ("partition", "account", "interface"):
        value = getattr(options, name)
        if value is not None and not _WORD.fullmatch(value):
            raise RecipeError(f"--{name} is {value!r}: give one word, e.g. main")
    if options.time is not None and _seconds(options.time) <= options.notice_s:
        raise RecipeError(
            f"--time is {options.time!r} and --notice is {options.notice_s} seconds: give a limit "
            "that is longer than the notice before it"
        )
    for line in options.setup:
        if "\n" in line or not line.strip():
            raise RecipeError(f"--setup is {line!r}: give one line of a shell, once for each")


def _seconds(time: str) -> int:
    """Seconds of a limit as sbatch writes it; raises RecipeError where it is none."""
    found = _TIME.fullmatch(time)
    if found is None:
        raise RecipeError(
            f"--time is {time!r}: give minutes, hours:minutes:seconds or "
            "days-hours:minutes:seconds, e.g. --time 1-12:00:00"
        )
    parts = [int(part) for part in found["parts"].split(":")]
    if found["days"] is not None:
        hours, minutes, seconds = parts + [0] * (3 - len(parts))
        return ((int(found["days"]) * 24 + hours) * 60 + minutes) * 60 + seconds
    if len(parts) < 3:
        minutes, seconds = parts + [0] * (2 - len(parts))
        return minutes * 60 + seconds
    return (parts[0] * 60 + parts[1]) * 60 + parts[2]


def slurm_script(
    recipe: Recipe,
    command: Sequence[str],
    nodes: Mapping[str, tuple[int, ...]],
    options: SlurmOptions,
    made_by: str,
) -> str:
    """Returns the text of the script.

    Args:
        recipe: The recipe, with its pools on GPUs or on the CPU. "cuda:0" is the first GPU of the
            job on the node of the pool's roles.
        command: Command of the coordinator: "train", "--restartable", files and settings.
        nodes: Of `nodes_of`.
        options: What else the job asks for.
        made_by: Command that made it, for the comment at its top.

    Raises:
        RecipeError: An option is wrong, a pool names a device that does not exist, or layouts or
            pools do not go with the nodes.
    """
    _check_options(options)
    check_nodes(recipe, nodes)
    words = [*command, *given_addresses(nodes)]
    parts = [
        _filled(_HEAD, name=recipe.run.name, made_by=made_by.replace("\n", "\n# ")),
        *(f"#SBATCH {one}\n" for one in _requests(recipe, nodes, options)),
        _filled(_START, setup="\n".join(options.setup), name=recipe.run.name),
    ]
    if nodes:
        members = ["coordinator", "client/drive", *dict.fromkeys(map(kind_of, recipe.roles))]
        parts.append(_filled(_MESH, members=" ".join(members), address=_address(options)))
        for service, own in nodes.items():
            places = [str(index + 1) for index in gpus_of(recipe, service, len(own))]
            gpus = ",".join(places) or "none"
            flags = [shlex.quote(flag) for flag in service_flags(recipe, role_of(service))]
            parts.append(f"serve {service} {own[0]} {len(own)} {gpus} {' '.join(flags)} &\n")
        parts.append(_addresses(recipe, nodes))
    train = ["rolemesh", *words]
    if nodes:
        # GPUs that it sees would go to pools that name none.
        train = ["env", "CUDA_VISIBLE_DEVICES=", *train]
    parts.append(_filled(_COORDINATOR, train=shlex.join(train)))
    return "".join(parts)


def _address(options: SlurmOptions) -> str:
    """Command of a shell that prints the address of a node."""
    if options.interface is None:
        return "hostname"
    return f'ip -4 -o addr show dev {options.interface} | sed "s|.* inet \\([0-9.]*\\)/.*|\\1|"'


def _filled(text: str, **values: str) -> str:
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    return text


def _requests(
    recipe: Recipe, nodes: Mapping[str, tuple[int, ...]], options: SlurmOptions
) -> list[str]:
    """Options of sbatch."""
    num_gpus = 0
    for role in recipe.roles:
        for service in recipe.services_of(role):
            if recipe.address(service) is None:
                own = gpus_of(recipe, service, len(nodes.get(service, (0,))))
                num_gpus = max([num_gpus, *(index + 1 for index in own)])
    requests = [
        f"--job-name={recipe.run.name}",
        f"--nodes={max((own[-1] for own in nodes.values()), default=0) + 1}",
        # Whole nodes: all their cores and memory. Shared memory counts as memory of the job.
        "--exclusive",
        "--mem=0",
    ]
    for name in ("partition", "account", "time"):
        value = getattr(options, name)
        if value is not None:
            requests.append(f"--{name}={value}")
    if num_gpus:
        requests.append(f"--gpus-per-node={num_gpus}")
    requests += [
        "--requeue",
        "--open-mode=append",
        "--output=%x-%j.log",
        f"--signal=B:USR1@{options.notice_s}",
    ]
    return requests


def _addresses(recipe: Recipe, nodes: Mapping[str, tuple[int, ...]]) -> str:
    """Waits for all services, and says to the coordinator where they are."""
    lines = [f"wait_for {service}\n" for service in nodes]
    for role in recipe.roles:
        places = [f'$(<"$mesh/{service}.address")' for service in recipe.services_of(role)]
        variable, value = address_setting(role, places)
        lines.append(f'export {variable}="{value}"\n')
    return "".join(lines)


_HEAD = """\
#!/bin/bash
# One recipe as a job of Slurm:
#
#   sbatch THIS_FILE                 # in a folder that all nodes share: paths count from there
#   sbatch THIS_FILE runs/@name@-12 # goes on with the run of job 12
#   scancel --batch --signal=INT JOB # ends the run after its step, with everything saved
#   scancel JOB                      # ends it at once; what was saved before stays
#
# `rolemesh` has to be on the PATH of the nodes. Before the time limit, and where a step is killed
# or a node fails, the job is queued again and goes on with its run.
# Made by: @made_by@
"""

_START = r"""
set -u
umask 077
@setup@
# sbatch hands the environment on. Models are folders, and nothing is fetched.
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 MALLOC_ARENA_MAX=2 PYTHONUNBUFFERED=1
run=${1:-runs/@name@-$SLURM_JOB_ID}
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
"""

_MESH = r"""
# Services of several nodes: members of one mesh, with an authority that signs for this start alone.
mesh=$run.mesh
rm -rf "$mesh" && mkdir -p "$mesh" "$run/logs" || fail "$run cannot be written"
rolemesh certs init "$mesh/certs" >/dev/null &&
    rolemesh certs issue "$mesh/certs" @members@ >/dev/null &&
    rm "$mesh/certs/authority.pem" || fail "no certificates could be made in $mesh"
export ROLEMESH_CERTIFICATES=$mesh/certs

# On each of several nodes of a service: they meet at the first one's address, at a port there.
on_hosts='
meet=$0.meet address=$(@address@)
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

"""

_COORDINATOR = r"""
(
    srun --overlap --nodes=1 --ntasks=1 --relative=0 --cpu-bind=none --job-name=coordinator \
        bash -c 'echo $$ >"$0"; exec "$@"' "$own/pid" @train@ --out "$run"
    echo $? >"$own/code"
) &
coordinator=$!
# A signal interrupts `wait`. If the step ends at that moment, `wait` does not know its exit status.
until [ -s "$own/code" ] || ! kill -0 "$coordinator" 2>/dev/null; do wait "$coordinator"; done
code=$(cat "$own/code" 2>/dev/null)
ended "${code:-137}" # Without a status, what waited for the step was killed itself.
"""
