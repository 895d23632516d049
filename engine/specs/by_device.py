"""Settings that the device decides where a recipe leaves them out, each with its reason.

Pure functions without torch: a service calls them when it makes a model or a sampler and logs what
they say, and `rolemesh doctor RECIPE` shows the same before anything starts.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rolemesh.engine.specs.models.activations import (
    Arithmetic,
    LayerWidths,
    adapted_layer_bytes,
    layer_bytes,
)
from rolemesh.engine.specs.models.sections import ModelSpec, Numerics
from rolemesh.engine.specs.sampling.rollout import VllmSpec

DeviceType = Literal["cpu", "cuda"]

ROOM_BYTES = 16 * 2**30
"""What a GPU is taken to have left for a pass where nobody has asked it: a fifth of 80 GB, which
weights, moments and a sampler share with it."""

ACTIVATIONS_SHARE = 0.5
"""Of the room for a pass, what activations may take before layers are recomputed. Logits, gathered
weights, the optimizer's and the allocator's own memory take the rest. Recomputing costs a forward
pass more, a quarter of the time of an update."""

BFLOAT16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16")
"""Instructions for products of bfloat16, as Linux and torch call them, on x86 and on ARM."""

_MOST_ISA = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
"""Variables that hold oneDNN, and so torch's products, to older instructions; the first one wins.
"""
_WITHOUT_BFLOAT16 = frozenset(
    (
        *("sse41", "avx", "avx2", "avx2_vnni", "avx2_vnni_2"),
        *("avx512_core", "avx512_core_vnni"),
    )
)
"""Values of theirs that leave no products of bfloat16."""

_GIVEN = "given by the recipe"
_NO_BFLOAT16 = "this CPU has no bfloat16 instructions: float32 products are faster"
_ON_A_CPU = "on a CPU"


@dataclass(frozen=True, slots=True)
class Choice:
    """What a setting is, and why."""

    value: Any
    reason: str


Choices = Mapping[str, Choice]
"""By the name of the key."""


@dataclass(frozen=True, slots=True)
class Device:
    """What computes."""

    type: DeviceType
    multiplies_bfloat16: bool = True
    """Whether it has instructions for products of bfloat16; a GPU has."""


def held_to_older(environment: Mapping[str, str]) -> str:
    """The setting that keeps a CPU's products of bfloat16 from use; empty where none does.

    Example: "ONEDNN_MAX_CPU_ISA=AVX2".
    """
    for name in _MOST_ISA:
        if value := environment.get(name):
            return f"{name}={value}" if value.lower() in _WITHOUT_BFLOAT16 else ""
    return ""


def cpu_of(instructions: Container[str], environment: Mapping[str, str]) -> Device:
    """A CPU by its instructions, and by what the user's variables leave of them."""
    has_them = any(name in instructions for name in BFLOAT16_INSTRUCTIONS)
    return Device("cpu", multiplies_bfloat16=has_them and not held_to_older(environment))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """What activations grow with."""

    num_layers: int
    """Of the whole model."""
    widths: LayerWidths
    num_stages: int = 1
    """Pipeline stages, which share the layers."""
    num_slices: int = 1
    """Tensor slices."""
    num_cuts: int = 1
    """Ranks that cut each packed row among them."""

    @classmethod
    def of_config(
        cls,
        text: Mapping[str, Any],
        *,
        num_layers: int = 0,
        num_stages: int = 1,
        num_slices: int = 1,
        num_cuts: int = 1,
    ) -> ModelSizes | None:
        """Reads config.json, or its part on text; None where it does not say them.

        Args:
            text: The config.
            num_layers: If fewer than the config's are used; 0: all.
            num_stages: Pipeline stages.
            num_slices: Tensor slices.
            num_cuts: Ranks that cut each packed row among them.
        """
        layers, widths = text.get("num_hidden_layers"), LayerWidths.of_config(text)
        if not isinstance(layers, int) or widths is None:
            return None
        return cls(
            num_layers=num_layers or layers,
            widths=widths,
            num_stages=num_stages,
            num_slices=num_slices,
            num_cuts=num_cuts,
        )


def sampler_choices(
    spec: VllmSpec,
    device: Device,
    *,
    numerics: Numerics = "exact",
    updates_between_steps: bool = False,
    num_slices: int = 1,
    has_adapter: bool = False,
    adapts_experts: bool = False,
) -> Choices:
    """How vLLM samples.

    Args:
        spec: Of the sampler.
        device: Where it computes.
        numerics: Of its role.
        updates_between_steps: Whether new weights may come between two tokens.
        num_slices: Ranks of a generation replica.
        has_adapter: Whether the policy's trainer trains an adapter.
        adapts_experts: Whether that adapter stands beside stacks of experts, too.

    Returns:
        max_num_seqs, enforce_eager, async_scheduling, activations; and adapters where there is one.

    Raises:
        ValueError: Async scheduling, or a way to add an adapter, is asked for where it cannot be.
    """
    on_gpu = device.type == "cuda"
    is_fast = numerics == "fast"
    if on_gpu:
        activations = Choice(spec.dtype, "as rollout.dtype says")
    elif not is_fast:
        activations = Choice("float32", f"exact numbers {_ON_A_CPU}: the trainer's to 1e-5")
    elif device.multiplies_bfloat16:
        activations = Choice(spec.dtype, "fast numerics: as rollout.dtype says")
    else:
        activations = Choice("float32", _NO_BFLOAT16)
    if updates_between_steps:
        ahead = Choice(False, "new weights may come between two tokens, and no step may be ahead")
    elif num_slices > 1:
        # vLLM 0.32 schedules the next step at once or after the last one, whichever is ready: on
        # several ranks that would be a race, and their collective operations would not match.
        ahead = Choice(False, "several ranks must schedule alike")
    elif on_gpu:
        ahead = Choice(True, "a GPU need not wait for the scheduler, and no update comes between")
    else:
        ahead = Choice(False, f"{_ON_A_CPU} scheduler and model share the cores")
    if spec.async_scheduling and (updates_between_steps or num_slices > 1):
        raise ValueError(f"rollout.async_scheduling is true, but {ahead.reason}: leave it out")
    chosen = {
        "max_num_seqs": _chosen(
            spec.max_num_seqs,
            Choice(256, "a GPU decodes 256 sequences in little more time than one")
            if on_gpu
            else Choice(64, f"{_ON_A_CPU} more sequences take as much more time"),
        ),
        "enforce_eager": _chosen(
            spec.enforce_eager,
            Choice(False, "CUDA graphs: decoding waits for kernel launches otherwise")
            if on_gpu
            else Choice(True, f"{_ON_A_CPU} there are no graphs to capture"),
        ),
        "async_scheduling": _chosen(spec.async_scheduling, ahead),
        "activations": _chosen(spec.activations, activations),
    }
    if not has_adapter:
        return chosen
    adapters = _adapter_choice(
        spec, chosen["activations"], on_gpu=on_gpu, adapts_experts=adapts_experts
    )
    return chosen | {"adapters": adapters}


def _adapter_choice(
    spec: VllmSpec, activations: Choice, *, on_gpu: bool, adapts_experts: bool
) -> Choice:
    """How vLLM adds an adapter; raises ValueError where it is not served as the spec says."""
    if adapts_experts and (spec.adapters == "slots" or activations.value == "bfloat16"):
        raise ValueError(
            f"adapter.targets has experts, and the sampler computes in {activations.value} "
            f"({activations.reason}) with rollout.adapters {spec.adapters or 'slots'}: vLLM's "
            "slots beside experts are not served; give rollout.activations float32 and "
            "rollout.adapters merged, or targets without experts"
        )
    computes = f"but the sampler computes in {activations.value} ({activations.reason})"
    if activations.value == "bfloat16":
        loses = "sums rounded to bfloat16 would lose small updates"
        if spec.adapters == "merged":
            raise ValueError(
                f"rollout.adapters is merged, {computes}, and {loses}: give slots, or "
                "rollout.activations float32"
            )
        return _chosen(spec.adapters, Choice("slots", loses))
    if not on_gpu:
        longer = f"{_ON_A_CPU} slots take longer, and sums in float32 lose nothing"
        return _chosen(spec.adapters, Choice("merged", longer))
    # lora_shrink_op.py of vLLM 0.32 asserts it.
    no_slots = "slots on a GPU take no float32"
    if spec.adapters == "slots":
        raise ValueError(
            f"rollout.adapters is slots, {computes}, and {no_slots}: give merged, or "
            "rollout.activations bfloat16"
        )
    return _chosen(spec.adapters, Choice("merged", no_slots))


def model_choices(
    spec: ModelSpec,
    device: Device,
    sizes: ModelSizes | None,
    *,
    numerics: Numerics = "exact",
    trains: bool = True,
    room_bytes: int | None = None,
) -> Choices:
    """How a model keeps weights and activations.

    Args:
        spec: Of the model.
        device: Where it computes.
        sizes: Of the whole model, and how it is cut; None: not known, and it counts as small.
        numerics: Of its role.
        trains: False for a frozen one.
        room_bytes: What the device has left beside weights, gradients and moments; None: it was not
            asked.

    Returns:
        activations; recompute of a trained model; and frozen_dtype of a frozen one, or of one that
        has an adapter.

    Raises:
        ValueError: Sequence parallelism is asked for where there is one slice.
    """
    on_gpu = device.type == "cuda"
    if numerics == "exact":
        activations = Choice("float32", "exact numerics")
    elif spec.compute_dtype == "float32":
        activations = Choice("float32", "as model.compute_dtype says")
    elif device.multiplies_bfloat16:
        activations = Choice("bfloat16", "fast numerics")
    else:
        activations = Choice("float32", _NO_BFLOAT16)
    chosen = {"activations": _chosen(spec.activations, activations)}
    if spec.sequence_parallel and sizes is not None and sizes.num_slices == 1:
        raise ValueError(
            "model.sequence_parallel is true, but the layout has tp 1, and no slices to share the "
            "tokens: leave it out, or give a layout with tp"
        )
    if not trains or spec.adapter is not None:
        is_narrow = spec.compute_dtype == "bfloat16" and (
            on_gpu or chosen["activations"].value == "bfloat16"
        )
        chosen["frozen_dtype"] = _chosen(
            spec.frozen_dtype,
            Choice("bfloat16", "its products are bfloat16 all the same: half the memory")
            if is_narrow
            else Choice("float32", "as it is trained"),
        )
    if not trains:
        return chosen
    recompute = Choice("none", f"{_ON_A_CPU} time is dearer than memory")
    if on_gpu:
        is_wide = spec.adapter is not None and chosen["frozen_dtype"].value == "float32"
        size = activation_bytes(
            spec,
            sizes,
            chosen["activations"].value == "bfloat16",
            frozen_bytes=4 if is_wide else 2,
        )
        room = ROOM_BYTES if room_bytes is None else room_bytes
        told = "taken to be " if room_bytes is None else ""
        recompute = Choice(
            "full" if size > ACTIVATIONS_SHARE * room else "none",
            f"about {size / 2**30:.1f} GiB of activations in a micro-batch, and room for passes is "
            f"{told}{max(0, room) / 2**30:.1f} GiB",
        )
    return chosen | {"recompute": _chosen(spec.recompute, recompute)}


def activation_bytes(
    spec: ModelSpec, sizes: ModelSizes | None, is_narrow: bool, *, frozen_bytes: int = 2
) -> int:
    """Bytes of activations that the layers of one rank keep for a backward pass, on a GPU.

    A stage keeps those of as many passes as there are stages (1F1B).

    Args:
        spec: Of the model.
        sizes: Of the whole model, and how it is cut; None: not known, 0 bytes.
        is_narrow: Whether the layers compute in bfloat16 from end to end.
        frozen_bytes: Of a number of the base beneath an adapter.
    """
    if sizes is None:
        return 0
    arithmetic: Arithmetic = "autocast"
    if spec.compute_dtype == "float32":
        arithmetic = "float32"
    elif is_narrow:
        arithmetic = "bfloat16"
    shared: dict[str, Any] = {
        "num_slices": sizes.num_slices,
        "shares_tokens": spec.sequence_parallel,
    }
    tokens = -(-spec.micro_batch_tokens // sizes.num_cuts)
    if spec.adapter is None:
        one = layer_bytes(sizes.widths, tokens, arithmetic, **shared)
    else:
        one = adapted_layer_bytes(
            sizes.widths,
            tokens,
            arithmetic,
            rank=spec.adapter.rank,
            targets=spec.adapter.targets,
            frozen_bytes=frozen_bytes,
            **shared,
        )
    layers = -(-sizes.num_layers // sizes.num_stages)
    return int(layers * sizes.num_stages * one)


def described(choices: Choices) -> Iterator[str]:
    """A line for each choice, e.g. "max_num_seqs 64 (given by the recipe)"."""
    for name, choice in choices.items():
        value = str(choice.value).lower() if isinstance(choice.value, bool) else choice.value
        yield f"{name} {value} ({choice.reason})"


def _chosen(given: Any, default: Choice) -> Choice:
    return default if given is None else Choice(given, _GIVEN)
