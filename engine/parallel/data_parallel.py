"""The data axis: parameters cut among neighbours (FSDP2), gradients summed over replicas.

Losses are divided by counts over the whole mini-batch, so everything here sums and nothing takes a
mean. Numbers of one rank and of many differ only in the order of float32 sums.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from rolemesh.engine.hardware.devices import use_device
from rolemesh.engine.parallel.experts.modules import experts_of
from rolemesh.engine.parallel.mesh import RankMesh


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The decoder layers: torch and transformers mark them in no other way for all families."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def cut_over_data(
    stage: nn.Module,
    mesh: RankMesh,
    device: torch.device,
    layers_in: torch.dtype | None = None,
) -> None:
    """Cuts the parameters of a stage over `mesh.fsdp`, in place; nothing where that is one rank.

    Each decoder layer is gathered for its own forward and backward; what is outside the layers
    (embedding, last norm, head) belongs to `stage` itself, and is whole as long as the stage's
    forward or backward runs. So everything that reads a weight must happen in `stage.forward`.

    Gradients are reduced after the backward of each micro-batch: leaving that to the last one would
    save traffic, but keep whole gradients on every rank, which is what the cut is there to avoid.
    Sums over replicas of the cut (HSDP) come once an optimizer step: `sum_over`.

    Parameters become DTensors, dimension 0 in chunks of ceil(rows / size); `local_part` reads them.

    Parameters on the meta device, which is how they come, so that no rank ever holds a whole
    model, are given memory for the parts; the caller fills them.

    Args:
        stage: What runs one micro-batch through this rank's layers.
        mesh: This rank's groups.
        device: Where parameters are to be.
        layers_in: Type in which the weights of layers are gathered and their products computed;
            None keeps their own. It spares traffic and the copies that autocast would keep of all
            layers. Parts and the sums of gradients stay in their own type. What is outside the
            layers is gathered in its own: a head adds up gradients over chunks.
    """
    group = mesh.fsdp
    if group.process_group is None:
        return
    # FSDP2 takes the thread's current GPU, and has no argument for another.
    use_device(device)
    axis = DeviceMesh.from_group(group.process_group, device.type)
    # Who calls a layer chooses the type of its inputs.
    narrow = MixedPrecisionPolicy(
        param_dtype=layers_in, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    of_layers = MixedPrecisionPolicy() if layers_in is None else narrow
    policies = [
        *((layer, axis, of_layers) for layer in layers_of(stage)),
        (stage, axis, MixedPrecisionPolicy()),
    ]
    # A vocabulary slice may be empty, and torch 2.13 cannot reduce the gradient of nothing.
    empty = {parameter for parameter in stage.parameters() if not parameter.numel()}
    ignored = set(empty)
    experts = experts_of(stage)
    if mesh.experts.size > 1:
        if mesh.expert_fsdp.process_group is None:
            # Each rank has whole experts of its own.
            ignored |= {one for module in experts for one in module.parameters()}
        else:
            own = DeviceMesh.from_group(mesh.expert_fsdp.process_group, device.type)
            # Before their layers, which leave out what is cut already.
            policies = [*((module, own, of_layers) for module in experts), *policies]
    for module, among, policy in policies:
        fully_shard(module, mesh=among, ignored_params=ignored, mp_policy=policy)
        cut = cast(FSDPModule, module)
        # FSDP2 averages by default. Gloo has no scaled sum, so the scaling (by 1) is asked for
        # apart from the sum.
        cut.set_gradient_divide_factor(1.0)
        cut.set_force_sum_reduction_for_comms(True)
    for parameter in empty:
        if parameter.is_meta:
            # In place, or a tied embedding and head would become two.
            made = nn.Parameter(
                torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad
            )
            torch.utils.swap_tensors(parameter, made)  # type: ignore[no-untyped-call]
    # As nn.Module.to_empty does, which would empty buffers too.
    stage._apply(  # type: ignore[no-untyped-call]
        lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor
    )


def gather_no_longer(stage: nn.Module) -> None:
    """Gives back the whole parameters that a forward pass without backward leaves gathered.

    They would be stale after the next optimizer step.
    """
    if isinstance(stage, FSDPModule):
        stage.reshard()


def forget_pass(stage: nn.Module, *, drops_gradients: bool) -> None:
    """Makes a cut stage usable again after a pass was broken off.

    Its first forward must have begun: torch sets up what is reset here with it.

    Args:
        stage: What `cut_over_data` cut.
        drops_gradients: True for a pass with backward: a layer in which that stopped half way
            still has whole weights, with gradients that the next one would add to. A pass that
            only scored has touched no gradient of an earlier one.

    Raises:
        RuntimeError: This torch cannot do it: 2.12 and older leave layers whole.
    """
    if isinstance(stage, FSDPModule):
        if not hasattr(stage, "reset_iter_state"):
            raise RuntimeError(
                f"a pass was broken off, and torch {torch.__version__} cannot set the layers back: "
                "start the service again, or install torch 2.13"
            )
        if drops_gradients:
            for parameter in stage.parameters():
                parameter.grad = None
        stage.reset_iter_state()


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a cut tensor of any shape, as a plain one that shares its memory.

    It has fewer rows than the whole, or none.
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
