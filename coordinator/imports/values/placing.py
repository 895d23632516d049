"""GPUs of the others as pools and layouts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from rolemesh.coordinator.imports.draft import Draft
from rolemesh.coordinator.imports.source import ImportedError, Source
from rolemesh.coordinator.imports.values.batch import trl_processes
from rolemesh.coordinator.imports.values.models import CUTS, ROLLOUT, VERL, row_cuts, sampler
from rolemesh.coordinator.imports.values.teachers import verl_gpus
from rolemesh.coordinator.recipe.role_names import field_of, teacher_role

_FIRST_PORT = 50051
_OWNERS = "expert_model_parallel_size"
"""How verl's sections of Megatron call the ranks that share experts out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placing:
    """Where roles compute."""

    gpus: int
    """Of the actor's pool."""
    hosts: int = 1
    tp: int = 1
    pp: int = 1
    fsdp: int | None = None
    ep: int = 1
    cp: int = 1
    generate_tp: int = 1
    apart: int = 0
    """Rollout services of their own; 0: the actor samples."""
    staleness: int = 0
    """Steps that these may be ahead; 0: none."""
    partial: bool = True
    is_one_ahead: bool = False
    """Whether these are always one step ahead."""
    others: dict[str, int] = field(default_factory=dict)
    """GPUs of roles that have a pool of their own."""
    cuts: dict[str, tuple[int, int, int, int]] = field(default_factory=dict)
    """Slices, stages, ranks that share experts and ranks that cut rows, of roles that differ from
    the actor's."""
    said: str = ""


def placing(source: Source) -> Placing:
    """Where a source has its roles compute."""
    makers = {"verl": _of_verl, "openrlhf": _of_openrlhf, "trl": _of_trl}
    return source.once(makers[source.system])


def _fitting(source: Source, gpus: int, tp: int, pp: int, names: tuple[str, ...]) -> int:
    """Replicas of a layout; raises ImportedError where it does not fit the GPUs."""
    if gpus % (tp * pp):
        shown = ", ".join(source.name_of(name) for name in names)
        raise ImportedError(
            f"{shown}: {gpus} GPUs are no multiple of tp {tp} x pp {pp}: give numbers that fit"
        )
    return gpus // (tp * pp)


def _owners(source: Source, megatron: str, tp: int, dp: int) -> int:
    """Ranks that share experts out, by a section of verl's: they divide the data axis here."""
    wanted = source.whole(f"{megatron}{_OWNERS}") or 1
    made = math.gcd(wanted, dp)
    if made != wanted:
        source.lose(
            f"{megatron}{_OWNERS}",
            f"ep of a layout divides its data axis ({dp}): {made} is taken",
        )
    sliced = source.whole(f"{megatron}expert_tensor_parallel_size")
    if sliced not in (None, tp):
        source.lose(
            f"{megatron}expert_tensor_parallel_size",
            f"tensor slices cut experts as they cut all else: {tp}",
        )
    return made


def _cutters(source: Source, role: str, prefix: str, dp: int) -> int:
    """Ranks that cut rows, by a section of verl's: they divide the data axis here."""
    wanted = row_cuts(source, role)
    made = math.gcd(wanted, dp)
    if made != wanted:
        for name in CUTS:
            source.lose(
                f"{prefix}{name}", f"cp of a layout divides its data axis ({dp}): {made} is taken"
            )
    return made


def _of_verl(source: Source) -> Placing:
    per_host, hosts = source.whole("trainer.n_gpus_per_node"), source.whole("trainer.nnodes")
    gpus = (per_host or 1) * (hosts or 1)
    wanted = source.whole(f"{ROLLOUT}tensor_model_parallel_size") or 1
    megatron = f"{VERL['actor']}megatron."
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
    tp, pp = (source.whole(f"{megatron}{name}") or 1 for name in names)
    is_cut = any(source.given(f"{megatron}{name}") for name in names)
    cut = source.whole(f"{VERL['actor']}fsdp_config.fsdp_size")
    said = ""
    if sampler(source)["type"] == "hf":
        wanted = 1
    if not is_cut:
        # The sampler's slices are cut out of those of training here.
        tp = math.gcd(wanted, gpus)
        if tp < wanted and not source.given(f"{ROLLOUT}tensor_model_parallel_size"):
            source.say(f"verl's default of {wanted} slices of the sampler does not fit {gpus} GPUs")
        if tp > 1:
            said = (
                f"The sampler's {tp} slices have to be slices of training here; verl trains "
                f"{gpus} whole replicas that FSDP cuts."
            )
    made = math.gcd(wanted, tp)
    if made != wanted:
        source.lose(
            f"{ROLLOUT}tensor_model_parallel_size",
            f"the sampler's slices divide those of training ({tp}): {made} is taken",
        )
    where = ("trainer.n_gpus_per_node", "trainer.nnodes")
    dp = _fitting(source, gpus, tp, pp, where)
    cuts = {}
    for role, prefix in (("reference", "actor_rollout_ref.ref."), ("critic", "critic.")):
        own = [f"{prefix}megatron.{name}" for name in names]
        further = (f"{prefix}megatron.{_OWNERS}", *(f"{prefix}{name}" for name in CUTS))
        if any(source.given(name) for name in (*own, *further)):
            own_tp, own_pp = (source.whole(name) or 1 for name in own)
            own_dp = _fitting(source, gpus, own_tp, own_pp, tuple(own))
            cuts[role] = (
                own_tp,
                own_pp,
                _owners(source, f"{prefix}megatron.", own_tp, own_dp),
                _cutters(source, role, prefix, own_dp),
            )
    teachers = verl_gpus(source)
    for role, (held, sliced) in teachers.items():
        cuts[role] = (math.gcd(sliced, held), 1, 1, 1)
    fsdp = cut if cut is not None and 0 < cut < dp and dp % cut == 0 else None
    if cut is not None and cut > 0 and fsdp is None and cut != dp:
        source.lose(f"{VERL['actor']}fsdp_config.fsdp_size", f"all {dp} replicas share the cut")
    found = Placing(
        gpus=gpus,
        hosts=hosts or 1,
        tp=tp,
        pp=pp,
        fsdp=fsdp,
        ep=_owners(source, megatron, tp, dp),
        cp=_cutters(source, "actor", VERL["actor"], dp),
        cuts=cuts,
        others={role: own for role, (own, _) in teachers.items()},
        generate_tp=made,
        said=said,
    )
    return _apart(source, found, wanted) if source.given("rollout.n_gpus_per_node") else found


def _apart(source: Source, found: Placing, sliced: int) -> Placing:
    """The same with samplers on GPUs of their own, as verl's asynchronous trainers have them."""
    gpus = (source.whole("rollout.n_gpus_per_node") or 1) * (source.whole("rollout.nnodes") or 1)
    staleness = source.number("async_training.staleness_threshold")
    partial = source.flag("async_training.partial_rollout")
    source.lost.pop(f"{ROLLOUT}tensor_model_parallel_size", None)
    is_cut = source.given(f"{VERL['actor']}megatron.tensor_model_parallel_size")
    return replace(
        found,
        tp=found.tp if is_cut else 1,
        generate_tp=sliced,
        said="",
        apart=max(1, gpus // sliced),
        is_one_ahead=staleness is None,
        staleness=0 if staleness is None else max(1, math.ceil(staleness)),
        partial=partial,
    )


def _of_openrlhf(source: Source) -> Placing:
    def total(role: str) -> int:
        nodes, each = source.whole(f"{role}.num_nodes"), source.whole(f"{role}.num_gpus_per_node")
        return (nodes or 1) * (each or 1)

    hosts = source.whole("actor.num_nodes") or 1
    gpus, tp = total("actor"), source.whole("ds.tensor_parallel_size") or 1
    engines = source.whole("vllm.num_engines") or 0
    sliced = source.whole("vllm.tensor_parallel_size") or 1
    is_async = source.flag("train.async_enable")
    partial = source.flag("train.partial_rollout_enable")
    ahead = source.whole("train.async_queue_size") or 1
    is_all = source.flag("train.colocate_all")
    with_reference = is_all or source.flag("train.colocate_actor_ref")
    with_critic = source.flag("train.colocate_critic_reward")
    others = {}
    for role, name in (("reference", "ref"), ("critic", "critic"), ("reward", "reward")):
        number = total(name)
        is_with = is_all or (role == "reference" and with_reference)
        if not is_with and not (role == "reward" and with_critic):
            others[role] = number
    if sampler(source)["type"] == "hf":
        return Placing(gpus=gpus, hosts=hosts, tp=tp, others=others)
    if is_all and not is_async:
        # One set of GPUs for all: the actor samples on its own ranks.
        if not gpus % (tp * sliced) and tp == 1:
            tp = sliced
        made = math.gcd(sliced, tp)
        if made != sliced:
            source.lose(
                "vllm.tensor_parallel_size",
                f"the sampler's slices divide those of training ({tp}): {made} is taken",
            )
        source.lose("vllm.num_engines", f"the {gpus} GPUs of the actor sample, {made} together")
        _fitting(source, gpus, tp, 1, ("actor.num_gpus_per_node", "ds.tensor_parallel_size"))
        return Placing(gpus=gpus, hosts=hosts, tp=tp, generate_tp=made, others=others)
    _fitting(source, gpus, tp, 1, ("actor.num_gpus_per_node", "ds.tensor_parallel_size"))
    return Placing(
        gpus=gpus,
        hosts=hosts,
        tp=tp,
        others=others,
        apart=max(1, engines),
        generate_tp=sliced,
        partial=partial,
        staleness=ahead if is_async else 0,
    )


def _of_trl(source: Source) -> Placing:
    gpus = trl_processes(source)
    wanted = source.whole("vllm_tensor_parallel_size") or 1
    if sampler(source)["type"] != "vllm":
        return Placing(gpus=gpus)
    tp = math.gcd(wanted, gpus)
    if tp != wanted:
        source.lose(
            "vllm_tensor_parallel_size", f"{gpus} GPUs sample, {tp} together: say more with --gpus"
        )
    return Placing(gpus=gpus, tp=tp, generate_tp=tp)


def _layout(made: Placing, role: str = "actor") -> dict[str, int]:
    tp, pp, ep, cp = made.cuts.get(role, (made.tp, made.pp, made.ep, made.cp))
    sizes = {"pp": pp, "tp": tp, "dp": made.gpus // (tp * pp), "ep": ep, "cp": cp}
    layout = {name: size for name, size in sizes.items() if size > 1}
    return layout if made.fsdp is None else {**layout, "fsdp": made.fsdp}


def put_placing(draft: Draft, made: Placing) -> None:
    """Puts layouts of the actor, and notes the rest for `put_pools`."""
    layout = _layout(made)
    if layout:
        draft.put("actor.train", layout, made.said or None)
    if made.generate_tp > 1 and not made.apart:
        draft.put("actor.generate.tp", made.generate_tp)


_PLACED = (
    *(("critic", "train"), ("reference", "layout"), ("teacher", "layout")),
    ("reward", "layout"),
)
"""Roles beside the actor, and the key of each one's layout."""


def put_pools(draft: Draft, made: Placing) -> None:
    """Puts pools, the layouts of the other roles, and addresses, once all roles are there."""
    used = made.gpus
    pools = {"gpus": {"devices": _devices(0, made.gpus), "roles": ["actor"]}}
    teachers = draft.get("teacher.named") or {}
    placed = [one for one in _PLACED if one[0] != "teacher" or not teachers]
    placed += [(teacher_role(name), "layout") for name in teachers]
    for role, key in placed:
        if draft.get(field_of(role)) is None or (
            role == "reference" and draft.get("reference.model") is None
        ):
            continue
        if role == "reward" and draft.get("reward.source.type") != "classifier":
            pools["judges"] = {"devices": ["cpu"], "roles": ["reward"]}
            continue
        own = made.others.get(role)
        if own is None:
            spread = {} if role == "reward" else _layout(made, role)
            if role == "reward" and made.gpus > 1:
                spread = {"dp": made.gpus}
            if role == "reward" and "critic" in made.others:
                pools["critic"]["roles"].append("reward")
                spread = draft.get("critic.train") or {}
            else:
                pools["gpus"]["roles"].append(role)
        else:
            pools[role] = {"devices": _devices(used, own), "roles": [role]}
            tp, *_ = made.cuts.get(role, (1, 1, 1, 1))
            sizes = {"tp": tp, "dp": own // tp}
            used, spread = used + own, {name: size for name, size in sizes.items() if size > 1}
        if spread:
            draft.put(f"{field_of(role)}.{key}", spread)
    if made.apart:
        ranks = made.apart * made.generate_tp
        pools["samplers"] = {"devices": _devices(used, ranks), "roles": ["rollout"]}
        used += ranks
        _put_rollout(draft, made)
    draft.put("pools", pools)
    if made.hosts > 1:
        roles = [role for pool in pools.values() for role in pool["roles"]]
        models = [role for role in roles if role not in pools.get("judges", {"roles": []})["roles"]]
        for number, role in enumerate(models):
            place = f"first-host:{_FIRST_PORT + number}"
            if role == "rollout" and made.apart > 1:
                each = [f"sampler-{index}:{_FIRST_PORT + number}" for index in range(made.apart)]
                draft.put("services.rollout", {"addresses": each})
            else:
                draft.put(f"services.{role}.address", place)
        draft.missing.append("services")
        draft.say(
            "services",
            f"FILL IN: {made.hosts} hosts. A role on several hosts is one that you start, with "
            "`rolemesh serve` on each (docs/hosts.md); these are the addresses of the first ones.",
        )


def _put_rollout(draft: Draft, made: Placing) -> None:
    actor = draft.tree["actor"]
    sampled = actor.pop("rollout")
    draft.put("rollout.model.path", actor["model"]["path"])
    draft.put("rollout.rollout", sampled)
    draft.put("rollout.data", actor["data"])
    if made.generate_tp > 1:
        draft.put("rollout.layout.tp", made.generate_tp)
    if made.apart > 1:
        draft.put("services.rollout.replicas", made.apart)
    if made.is_one_ahead:
        draft.put("schedule.sampler.type", "one_step_ahead")
    if made.staleness:
        chosen = {"type": "async", "max_staleness": made.staleness}
        draft.put("schedule.sampler", {**chosen, "partial_rollouts": made.partial})


def _devices(first: int, number: int) -> list[str]:
    return [f"cuda:{index}" for index in range(first, first + number)]
