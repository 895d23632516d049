"""`rolemesh render`: files that start a mesh on an engine, made from a recipe."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from rolemesh.coordinator.commands.terminal.ending import refuse
from rolemesh.coordinator.commands.terminal.options import Overrides, Recipes
from rolemesh.coordinator.recipe.errors import RecipeError
from rolemesh.coordinator.recipe.hub.hf_files import with_files
from rolemesh.coordinator.recipe.hub.hf_names import hf_places
from rolemesh.coordinator.recipe.loading import load_recipe
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.render.compose import compose_file
from rolemesh.coordinator.render.compose_hosts import ComposeHosts, file_of_host, hosts_header
from rolemesh.coordinator.render.kubernetes import kubernetes_manifests
from rolemesh.coordinator.render.kubernetes_options import KubernetesOptions, hosts_of, own_pools
from rolemesh.coordinator.render.memory import unsized_models
from rolemesh.coordinator.render.nodes import given_addresses, nodes_of, roles_of_nodes
from rolemesh.coordinator.render.placement import names_gpus, spread
from rolemesh.coordinator.render.slurm import SlurmOptions, slurm_script
from rolemesh.coordinator.state.files import write_atomically

app = typer.Typer(
    help="Files that start a mesh, made from a recipe.", no_args_is_help=True, add_completion=False
)


@app.callback()
def _group() -> None:
    """A group of commands, of however few."""


Gpus = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        max=64,
        help="Spreads the roles over so many GPUs of a host; needed where the recipe's pools name "
        "none.",
    ),
]
Out = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", help="Writes there, not to the screen.")
]


@app.command()
def compose(
    recipe: Recipes,
    gpus: Gpus = None,
    devices: Annotated[
        str | None,
        typer.Option(
            metavar="ID,ID...",
            help="What cuda:0, cuda:1, ... are, as nvidia-smi counts them or by UUID; 0,1,...",
        ),
    ] = None,
    hosts: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS,ADDRESS...",
            help="Spreads the mesh over hosts, each with an address that the others reach; one "
            "file is written for each, FILE.0.yaml and so on. Needs --on and --out.",
        ),
    ] = None,
    on: Annotated[
        list[str] | None,
        typer.Option(
            "--on",
            metavar="ROLE=HOST",
            help="Puts a role on a host, counted from 0, or its ranks on several, as actor=0,1; of "
            "several rollout services, rollout=0,1 puts each on one. May be repeated; roles that "
            "are left out are on host 0.",
        ),
    ] = None,
    overrides: Overrides = None,
    out: Out = None,
) -> None:
    """Writes a file to add to docker-compose.yml: GPUs, layouts and shared memory of a recipe.

    Example: rolemesh render compose recipes/quickstart-ppo.yaml --gpus 4 --out my-gpus.yaml, then
    docker compose -f docker-compose.yml -f my-gpus.yaml up
    """
    ids = None if devices is None else [text.strip() for text in devices.split(",")]
    if ids is not None and (not all(ids) or len(set(ids)) < len(ids)):
        refuse(f"--devices is {devices!r}: give each device once, e.g. --devices 0,1")
    if ids is not None and gpus is not None and len(ids) < gpus:
        refuse(f"--devices names {len(ids)} devices, but --gpus is {gpus}: name as many")
    if (hosts is None) != (on is None):
        refuse("give --hosts and --on together: the hosts' addresses, and the roles of each")
    if hosts is not None and out is None:
        refuse("--hosts is given, and each host has a file of its own: give --out, e.g. mesh.yaml")
    settings = list(overrides or ())
    try:
        loaded = load_recipe(recipe, overrides=settings)
        _refuse_hub_names(loaded)
        nodes = nodes_of(loaded, on or (), "host")
        if gpus is not None:
            settings += _spread(loaded, gpus, roles_of_nodes(loaded, nodes) if nodes else None)
            loaded = load_recipe(recipe, overrides=settings)
        elif ids is not None and not names_gpus(loaded):
            refuse("--devices is given, but no pool of the recipe names a GPU: give --gpus")
        given = _given(set=overrides, gpus=gpus, devices=devices)
        command = _command(recipe, settings)
        if hosts is None or out is None:
            header = _header([*map(str, recipe), *given])
            files = [(out, compose_file(loaded, command, ids, header))]
        else:
            given += _given(hosts=hosts, on=on, out=out)
            mesh = ComposeHosts.checked(loaded, hosts.split(","), nodes)
            made_by = shlex.join([*map(str, recipe), *given])
            command += given_addresses(nodes)
            files = []
            for number in range(len(mesh.addresses)):
                header = hosts_header(loaded, mesh, number, out, made_by)
                text = compose_file(loaded, command, ids, header, mesh, number)
                files.append((file_of_host(out, number), text))
    except RecipeError as error:
        refuse(str(error))
    for file, text in files:
        _write(text, file)
    if gpus is not None and hosts is None:
        _tell_idle(loaded, gpus)
    _tell_unsized(loaded, "shm_size")


def _tell_unsized(recipe: Recipe, size: str) -> None:
    for folder in dict.fromkeys(unsized_models(recipe)):
        sys.stderr.write(
            f"{folder} holds no *.safetensors here, so {size} does not count the cuts of its "
            f"training (run.recovery.cuts): run this where the model is, or raise {size}\n"
        )


@app.command()
def slurm(
    recipe: Recipes,
    on: Annotated[
        list[str] | None,
        typer.Option(
            "--on",
            metavar="ROLE=NODE",
            help="Puts a role on a node, counted from 0, or its ranks on several, as actor=0,1; of "
            "several rollout services, rollout=1,2 puts each on one. May be repeated; roles that "
            "are left out are on node 0. Without it, all are on one node.",
        ),
    ] = None,
    gpus: Gpus = None,
    partition: Annotated[str | None, typer.Option(metavar="NAME", help="Of the cluster.")] = None,
    account: Annotated[str | None, typer.Option(metavar="NAME", help="That pays.")] = None,
    time: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Limit of each start of the job, e.g. 1-12:00:00."),
    ] = None,
    interface: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Network interface by which nodes of one role reach each other, e.g. ib0; that of "
            "their host names.",
        ),
    ] = None,
    notice: Annotated[
        int,
        typer.Option(
            metavar="SECONDS",
            min=60,
            max=65535,
            help="How long before the limit the run is told to save: longer than a step and its "
            "checkpoint.",
        ),
    ] = 300,
    setup: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LINE",
            help="A line of the shell before all else, e.g. '. .venv/bin/activate'. May be "
            "repeated.",
        ),
    ] = None,
    overrides: Overrides = None,
    out: Out = None,
) -> None:
    """Writes a job for sbatch: a recipe on one node, or with roles on several.

    Example: rolemesh render slurm recipes/quickstart-ppo.yaml --gpus 8 --on critic=1 --on
    reference=1 --time 12:00:00 --out job.sh, then sbatch job.sh
    """
    settings = list(overrides or ())
    options = SlurmOptions(
        partition=partition,
        account=account,
        time=time,
        interface=interface,
        notice_s=notice,
        setup=setup or (),
    )
    given = _given(on=on, gpus=gpus, partition=partition, account=account, time=time)
    given += _given(interface=interface, notice=notice, setup=setup, set=overrides)
    try:
        loaded = load_recipe(recipe, overrides=settings)
        nodes = nodes_of(loaded, on or ())
        if gpus is not None:
            hosts = roles_of_nodes(loaded, nodes)
            settings += _spread(loaded, gpus, hosts)
            loaded = load_recipe(recipe, overrides=settings)
        # Nodes may reach no hub: it comes here and now, into a cache that they see, too.
        loaded = with_files(loaded)
        settings += [f"{field}={name}" for field, name in loaded.hf_names.items()]
        made_by = f"rolemesh render slurm {shlex.join([*map(str, recipe), *given])}"
        text = slurm_script(loaded, _command(recipe, settings), nodes, options, made_by)
    except RecipeError as error:
        refuse(str(error))
    _write(text, out)


@app.command()
def kubernetes(
    recipe: Recipes,
    image: Annotated[str, typer.Option(metavar="IMAGE", help="Of the roles.")],
    coordinator_image: Annotated[
        str | None, typer.Option(metavar="IMAGE", help="Of the coordinator; that of the roles.")
    ] = None,
    store_image: Annotated[
        str, typer.Option(metavar="IMAGE", help="Of the store: Valkey.")
    ] = "valkey/valkey:9-alpine",
    name: Annotated[str, typer.Option(metavar="NAME", help="Before all names.")] = "rolemesh",
    namespace: Annotated[
        str | None, typer.Option(metavar="NAME", help="That of `kubectl apply` if left out.")
    ] = None,
    claim: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="PersistentVolumeClaim, shared by all nodes, with folders .models, recipes and "
            "runs.",
        ),
    ] = "rolemesh",
    hosts: Annotated[
        list[str] | None,
        typer.Option(
            "--hosts",
            metavar="ROLE=N",
            help="Puts the ranks of a role on N pods, by a LeaderWorkerSet, which the cluster has "
            "to know. May be repeated.",
        ),
    ] = None,
    gpu: Annotated[
        bool,
        typer.Option(
            "--gpu",
            help="Gives each role with a model a GPU for each of its ranks; needed where the "
            "recipe's pools name none.",
        ),
    ] = False,
    overrides: Overrides = None,
    out: Out = None,
) -> None:
    """Writes manifests for kubectl: a recipe as a Job, and a StatefulSet for each of its roles.

    Example: rolemesh render kubernetes recipes/quickstart-ppo.yaml --image registry/rolemesh:gpu
    --gpu --out mesh.yaml, then kubectl apply -f mesh.yaml
    """
    settings = list(overrides or ())
    try:
        loaded = load_recipe(recipe, overrides=settings)
        _refuse_hub_names(loaded)
        if gpu:
            _refuse_named(loaded, "--gpu")
            settings += own_pools(loaded)
            loaded = load_recipe(recipe, overrides=settings)
        options = KubernetesOptions(
            image=image,
            coordinator_image=coordinator_image or image,
            store_image=store_image,
            name=name,
            namespace=namespace,
            claim=claim,
            hosts=hosts_of(loaded, hosts or ()),
        )
        files = {file.name: file.read_text() for file in recipe}
        if len(files) < len(recipe):
            refuse("RECIPE: two files have one name: give files of different names")
        given = [*map(str, recipe), *_given(image=image, coordinator_image=coordinator_image)]
        given += _given(name=name, namespace=namespace, claim=claim, hosts=hosts)
        given += ["--gpu"] * gpu + _given(set=overrides)
        header = _kubernetes_header(loaded, options, given)
        text = kubernetes_manifests(loaded, files, settings, options, header)
    except RecipeError as error:
        refuse(str(error))
    _write(text, out)
    _tell_unsized(loaded, "sizeLimit")


def _kubernetes_header(recipe: Recipe, options: KubernetesOptions, given: list[str]) -> str:
    start, roles = options.name, " ".join(recipe.roles)
    return f"""\
One recipe on Kubernetes. Once, for its certificates, passwords and files:

  rolemesh certs init certs && rolemesh certs issue certs --days 366 \\
      coordinator client/drive {roles}
  kubectl create secret generic {start}-coordinator \\
      --from-file=certs/coordinator.pem --from-file=certs/client-drive.pem
  for role in {roles}; do
      kubectl create secret generic {start}-$role --from-file=certs/$role.pem; done
  openssl rand -hex 32 | kubectl create secret generic {start}-store --from-file=password=/dev/stdin
  openssl rand -hex 32 | kubectl create secret generic {start}-api --from-file=token=/dev/stdin

and a PersistentVolumeClaim {options.claim} (ReadWriteMany) with the folders .models, recipes and
runs, which group 10001 may read, and write in runs. Then:

  kubectl apply -f THIS_FILE && kubectl logs -f job/{start}-coordinator

Made by: rolemesh render kubernetes {shlex.join(given)}"""


def _refuse_hub_names(recipe: Recipe) -> None:
    """Ends the command where a recipe names something that containers do not have."""
    for place in hf_places(recipe):
        refuse(
            f"{place.field} is {place.text!r}, but containers reach no hub, and see no cache of "
            "this host: call `rolemesh fetch RECIPE --to .models`, and give the folder that it "
            f"prints (--set {place.field}=.models/...)"
        )


def _refuse_named(recipe: Recipe, flag: str) -> None:
    """Ends the command where the recipe says itself where its roles are."""
    if names_gpus(recipe):
        refuse(
            f"{flag} is given, but the recipe's pools name GPUs already: leave it out, or take the "
            "devices out of the recipe's pools"
        )


def _spread(
    recipe: Recipe, gpus: int, hosts: list[tuple[list[str], int]] | None = None
) -> list[str]:
    _refuse_named(recipe, "--gpus")
    return spread(recipe, gpus, hosts)


def _write(text: str, out: Path | None) -> None:
    if out is None:
        sys.stdout.write(text)
        return
    try:
        write_atomically(out, text)
    except OSError as error:
        refuse(f"--out {out} cannot be written ({error.strerror}): name a file elsewhere")


def _command(files: list[Path], settings: list[str]) -> list[str]:
    flags = [word for setting in settings for word in ("--set", setting)]
    # A container that is started again goes on with its run.
    return ["train", "--restartable", *(str(file) for file in files), *flags]


def _given(**options: str | int | Path | list[str] | None) -> list[str]:
    """Options of a command line: those that are not None, a list as an option that is repeated."""
    return [
        f"--{name.replace('_', '-')}={value}"
        for name, values in options.items()
        for value in (values if isinstance(values, list) else [values])
        if value is not None
    ]


def _header(arguments: list[str]) -> str:
    return (
        "One recipe on the GPUs of one host, to add to docker-compose.yml:\n\n"
        "  docker compose -f docker-compose.yml -f THIS_FILE up\n\n"
        "Needs the NVIDIA container toolkit, a driver for CUDA 13, and `make images DEVICE=gpu`.\n"
        f"Made by: rolemesh render compose {shlex.join(arguments)}"
    )


def _tell_idle(recipe: Recipe, gpus: int) -> None:
    used = {device for pool in recipe.pools.values() for device in pool.devices} - {"cpu"}
    if len(used) < gpus:
        sys.stderr.write(
            f"{gpus - len(used)} of {gpus} GPUs are left idle: give a role a larger layout, e.g. "
            "--set actor.train.dp=...\n"
        )
