"""A transformers decoder, or the part of one that a rank holds.

Shape letters: S packed tokens, D width.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from rolemesh.engine.hardware.devices import device_of, kind_of, memory_left
from rolemesh.engine.images.processing import image_tokens_of
from rolemesh.engine.layout.adapters import is_factor, split_factor
from rolemesh.engine.layout.families import (
    EMBEDDING,
    LM_HEAD,
    DecoderShape,
    RefusedSettingError,
    UnsupportedFamilyError,
)
from rolemesh.engine.layout.slices import check_layout
from rolemesh.engine.models.adapters.adapters import attach, module_in_layer, with_adapter
from rolemesh.engine.models.adapters.shared_base import share_base
from rolemesh.engine.models.buffers import saved_buffers
from rolemesh.engine.models.folder import load_model, maker_without_values
from rolemesh.engine.models.images.image_tower import Tower, tower_of
from rolemesh.engine.models.images.shown_images import Features, Shown, show_images
from rolemesh.engine.models.layers.experts import group_experts
from rolemesh.engine.models.layers.fused_layers import fuse_layers
from rolemesh.engine.models.layers.recompute import apply_recompute
from rolemesh.engine.models.layers.rounding import (
    multiply_as_they_are,
    narrow_layers,
    round_for_good,
    round_weights,
)
from rolemesh.engine.models.layers.routing import Routed, Routers, routes_of
from rolemesh.engine.models.layers.scaled_ends import divide_states, unscaled
from rolemesh.engine.models.layers.shared_attention import (
    SHARING_ATTENTION,
    check_cut_rows,
    inputs_of,
    takes_packed_rows,
)
from rolemesh.engine.models.sharded_loading import load_shard, read_parts
from rolemesh.engine.models.vocabulary.row_gradients import spare_dense_gradient
from rolemesh.engine.packing.packed_rows import PackedRows
from rolemesh.engine.packing.pass_cost import PassCost
from rolemesh.engine.parallel.agreement import Peers
from rolemesh.engine.parallel.data_parallel import local_part
from rolemesh.engine.parallel.low_rank import Factor
from rolemesh.engine.parallel.mesh import RankMesh
from rolemesh.engine.parallel.stages import global_name
from rolemesh.engine.parallel.tensor_parallel import partial_gradients
from rolemesh.engine.parallel.token_shares import gather_shares, share_range
from rolemesh.engine.specs import ModelSpec, Numerics
from rolemesh.engine.specs.by_device import ModelSizes, described, model_choices
from rolemesh.engine.specs.models.activations import LayerWidths

logger = logging.getLogger(__name__)

_STATE_BYTES = 16
"""Of a parameter that is trained: it, its gradient and two moments, in float32."""
_FROZEN_BYTES = 4
"""Of one beneath an adapter, at most."""


class Decoder(nn.Module):
    """The layers of a policy, critic or classifier: all, or one rank's stage and slice.

    Owned by the rank's compute thread. With pipeline stages, hidden states pass through
    `stage_forward` of each; only the last stage has the subclass's `finish`.

    Example, of two stages::

        hidden_1SD = first.stage_forward(rows, None)
        hidden_1SD = last.stage_forward(rows, hidden_1SD)
    """

    def __init__(
        self,
        auto_class: Any,
        spec: ModelSpec,
        *,
        config: Any,
        device: torch.device | str,
        mesh: RankMesh,
        may_miss: tuple[str, ...] = (),
        numerics: Numerics = "exact",
        trainable: bool = True,
    ) -> None:
        """Loads the rank's part, float32, or where it is frozen in the type chosen for that.

        Args:
            auto_class: Of transformers; says what head the model has.
            spec: Which folder, and how to compute.
            config: From `read_config`, possibly with another number of labels.
            device: Where the weights live.
            mesh: The rank's place.
            may_miss: Prefixes of parameters that the folder may lack.
            numerics: Whether activations may be bfloat16. On a CPU without instructions for it no
                product is of bfloat16, whatever this says.
            trainable: False for a frozen model.

        Raises:
            ModelFolderError: The folder is missing or not whole.
            LayoutError: The model cannot be cut so.
            UnsupportedFamilyError: More than one rank, and the family has no plan; or the model
                computes what nothing here does.
        """
        super().__init__()
        self.spec = spec
        self.config = config
        """transformers config of the whole model; that of `lm` is its stage's."""
        self.device = torch.device(device)
        self.mesh = mesh
        self.shape: DecoderShape | None = _shape(auto_class, config, mesh)
        """Sizes of the whole model; None for a family without a plan."""
        if self.shape is not None and spec.adapter is not None:
            self.shape = with_adapter(self.shape, spec.adapter)
        self.missing: frozenset[str]
        """Parameters of this rank that the folder lacked."""
        machine = device_of(kind_of(self.device))
        choices = model_choices(
            spec,
            machine,
            _sizes(config, mesh),
            numerics=numerics,
            trains=trainable,
            room_bytes=self._room_bytes() if trainable else None,
        )
        adapter = spec.adapter
        self.shares_tokens = mesh.tp.size > 1 and spec.sequence_parallel
        """Whether each tensor slice holds only its share of the tokens between its blocks."""
        if self.shape is not None:
            fuse_layers(self.shape.family)
            check_layout(self.shape, mesh.layout)
        is_cut = mesh.tp.size * mesh.pp.size * mesh.fsdp.size * mesh.experts.size > 1
        if self.shape is not None and (is_cut or maker_without_values() is not None):
            self.lm, self.missing = load_shard(
                auto_class,
                spec,
                config=config,
                shape=self.shape,
                mesh=mesh,
                may_miss=may_miss,
                shares_tokens=self.shares_tokens,
            )
        else:
            self.lm, self.missing = load_model(auto_class, spec, config=config, may_miss=may_miss)
            if adapter is not None:
                self.missing -= attach(self.lm, adapter)
        if self.shape is not None:
            divide_states(self.lm, self.shape)
        group_experts(self.lm, mesh.experts)
        self.routers = (
            Routers(self.lm, self.shape, mesh.pp)
            if self.shape is not None and self.shape.experts is not None
            else None
        )
        """Of a mixture of experts of a known family."""
        self.multiplies_in_float32 = (
            spec.compute_dtype == "bfloat16" and not machine.multiplies_bfloat16
        )
        """Whether numbers of bfloat16 are multiplied as float32, in which this machine is fast."""
        for line in described(choices):
            logger.info("%s: model.%s", type(self).__name__, line)
        self.is_narrow = choices["activations"].value == "bfloat16"
        """Whether the layers compute in bfloat16 from end to end."""
        self.autocasts = (
            spec.compute_dtype == "bfloat16"
            and not self.is_narrow
            and not self.multiplies_in_float32
        )
        """Whether torch's autocast makes the layers' products bfloat16."""
        self.is_rounded = False
        """Whether weights were rounded to bfloat16 for good, which are then not rounded anew."""
        if trainable:
            apply_recompute(self.lm, choices["recompute"].value)
            # On a GPU sums of rows have no fixed order, and the table is no more than memory.
            if adapter is None and mesh.fsdp.size == 1 and kind_of(self.device) == "cpu":
                spare_dense_gradient(self.lm)
        if "frozen_dtype" in choices and choices["frozen_dtype"].value == "bfloat16":
            self._hold_in_bfloat16()
        if self.is_narrow:
            narrow_layers(self.lm.base_model, narrow_products=not self.multiplies_in_float32)
        elif self.multiplies_in_float32:
            self._round_layers(trainable, narrow_gradients=False)
        elif spec.compute_dtype == "float32" and kind_of(self.device) == "cpu":
            multiply_as_they_are(self.lm.base_model)
        self.image_tokens = image_tokens_of(spec.path)
        """How images stand among tokens; None for a model that takes none."""
        self._tower: Tower | None = None
        if self.image_tokens is not None and mesh.pp.is_first:
            assert self.shape is not None  # each family of images has a record
            show_images(self.lm.base_model, self.shape.num_deepstack_levels)
        self.packing = self._packed()
        """What decides how rows are packed; None: the model takes rectangles alone."""
        if mesh.cp.size > 1:
            check_cut_rows(config, mesh.cp.size, are_packed=self.packing is not None)

    def _room_bytes(self) -> int | None:
        """What the GPU has left for passes, beside this rank's weights, gradients and moments.

        The least of all ranks: what they recompute must be the same, or their collective operations
        do not match. None where there is no GPU to ask, or the model's size is not known.
        """
        left = memory_left(self.device)
        if left is None or self.shape is None:
            return None
        state_bytes = sum(
            math.prod(parameter.shape)
            * (_STATE_BYTES if self.shape.trains(name) else _FROZEN_BYTES)
            for name, parameter in self.shape.manifest("float32").items()
        )
        ranks = self.mesh.tp.size * self.mesh.pp.size * self.mesh.fsdp.size
        room = left - state_bytes // ranks
        if maker_without_values() is not None:
            return room
        _, rooms = Peers.of(self.mesh.world, self.device).agree(lambda: (None, room))
        least: int = min(rooms)
        return least

    def _round_layers(self, trainable: bool, *, narrow_gradients: bool) -> None:
        """Makes the layers compute with weights rounded to bfloat16, and float32 activations."""
        layers, head = self.lm.base_model, self.lm.get_output_embeddings()
        is_wide = all(weight.dtype == torch.float32 for weight in layers.parameters())
        is_frozen = not trainable or self.spec.adapter is not None
        # Parts that a data axis cuts are read later, and gathered for each pass.
        if is_wide and is_frozen and self.mesh.fsdp.size == 1:
            for part in (layers, head):
                if part is not None:
                    round_for_good(part)
            self.is_rounded = True
        if not self.is_rounded or (trainable and narrow_gradients):
            round_weights(layers, narrow_gradients=narrow_gradients, are_rounded=self.is_rounded)
        else:
            multiply_as_they_are(layers)

    def _hold_in_bfloat16(self) -> None:
        """Halves the memory of a frozen model whose products are bfloat16 all the same.

        Only matrices, and no score head: where the folder's are bfloat16, no result changes.
        """
        if self.shape is None:
            return
        output = self.lm.get_output_embeddings()
        parts = [self.lm.base_model] if output is None else [self.lm.base_model, output]
        factors = {
            id(one.weight) for one in self.lm.base_model.modules() if isinstance(one, Factor)
        }
        for weight in {weight for part in parts for weight in part.parameters()}:
            if weight.dim() > 1 and id(weight) not in factors:
                weight.data = weight.data.bfloat16()
        embedding = self.lm.base_model.embed_tokens
        if embedding is not None:
            rows, scale = unscaled(embedding)
            # Hidden states begin in float32, as those of a model that is trained.
            embedding.forward = lambda tokens: rows(tokens).float() * scale

    @property
    def rounds_to(self) -> str:
        """Type to which weights are rounded, where all else is computed in float32 on a CPU.

        Empty where activations are rounded, too. A sampler of the same rounding gives the same
        log-probs but for the order of sums.
        """
        is_exact = kind_of(self.device) == "cpu" and not self.is_narrow and not self.autocasts
        return self.spec.compute_dtype if is_exact else ""

    @property
    def layers_in(self) -> torch.dtype | None:
        """Type in which a data axis that cuts the layers gathers them; None: their own."""
        return torch.bfloat16 if self.autocasts or self.is_narrow else None

    def read_parts(self) -> None:
        """Fills this rank's parts of weights that were just cut over the data axis.

        Nothing where the axis cuts none: those were filled when the model was made.
        """
        if self.mesh.fsdp.size == 1:
            return
        assert self.shape is not None  # more than one rank only with a plan
        parts = {name: local_part(weight.detach()) for name, weight in self.named_weights()}
        read_parts(parts, self.spec, shape=self.shape, mesh=self.mesh)

    @property
    def is_decoder(self) -> bool:
        """Whether attention is causal. Encoders only score whole rows, frozen and on one rank."""
        return True

    def _packed(self) -> PassCost | None:
        """Lets the model take packed rows, if its attention may be ours."""
        widths = LayerWidths.of_config(self.config.get_text_config().to_dict())
        if widths is None or not self.is_decoder or not takes_packed_rows(self.lm):
            return None
        self.lm.set_attn_implementation(SHARING_ATTENTION)
        return PassCost.of_sizes(
            layer_weights=widths.weights,
            attention_width=widths.query,
            kind=kind_of(self.device),
            shares=self.spec.share_prefixes != "never",
        )

    def stage_forward(self, rows: PackedRows, hidden_1SD: torch.Tensor | None) -> torch.Tensor:
        """Runs this stage's layers on packed rows, without a head.

        A model that takes no packed rows gets them as a rectangle. That needs no mask: attention is
        causal, so a pad can only influence later pads.

        Args:
            rows: The same on all ranks of the model group; apart where `packing` is None.
            hidden_1SD: What the stage before returned, float32 [1, S, D]; None on the first stage.
                Of rows that are cut, S counts this rank's part alone.

        Returns:
            float32 [1, S, D]: the residual stream, on the last stage normed.

        Raises:
            ValueError: Hidden states on the first stage, or none on a later one.
        """
        if (hidden_1SD is None) != self.mesh.pp.is_first:
            raise ValueError(
                f"hidden_1SD is {'None' if hidden_1SD is None else 'given'} on stage "
                f"{self.mesh.pp.index}: give None on stage 0, and what the stage before returned "
                "on all others"
            )
        rectangle = rows.rectangle() if self.packing is None else None
        inputs: dict[str, Any] = {} if rectangle is not None else inputs_of(rows.layout, rows.cut)
        if hidden_1SD is not None:
            inputs["inputs_embeds"] = hidden_1SD.bfloat16() if self.is_narrow else hidden_1SD
        else:
            inputs["input_ids"] = rows.tokens_1L if rectangle is None else rectangle.tokens_BT
        if self.shares_tokens:
            inputs["token_shape"] = tuple(rows.tokens_1L.shape)
        # A context of its own for each pass: autocast keeps the bfloat16 copy of a weight until the
        # context ends, so each weight is cast once a pass and never stale after an optimizer step.
        counts = self.routers is not None and torch.is_grad_enabled()
        routes = (
            None if self.routers is None else routes_of(rows, counts=counts, rectangle=rectangle)
        )
        with (
            Routed(routes),
            Shown(self._features(rows)),
            torch.autocast(rows.tokens_1S.device.type, torch.bfloat16, enabled=self.autocasts),
        ):
            states: torch.Tensor = self.lm.base_model(**inputs, use_cache=False).last_hidden_state
        if rectangle is not None:
            states = rectangle.packed(states)
        if self.shares_tokens:
            states = gather_shares(states, self.mesh.tp, inputs["token_shape"])
        # Between stages, and to a head, they go in the type of a score.
        return states.float() if self.is_narrow else states

    def _features(self, rows: PackedRows) -> Features | None:
        """What the tower makes of images, on the stage that has the embedding."""
        if rows.images is None or not self.mesh.pp.is_first:
            return None
        if self._tower is None:
            self._tower = tower_of(self.spec.path, self.device)
        share = share_range(rows.tokens_1L.numel(), self.mesh.tp) if self.shares_tokens else None
        return Features.of(rows.images, self._tower, share)

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters by Hugging Face name, layers numbered as in the whole model.

        A tied one comes once, under its first name; on a last stage without the embedding it is
        "lm_head.weight".
        """
        for name, weight in self.lm.named_parameters():
            yield self._full_name(name), weight

    def _full_name(self, name: str) -> str:
        return name if self.shape is None else global_name(name, self.shape, self.mesh.pp)

    def trained_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Those of `named_weights` that training changes: with an adapter few, else all."""
        for name, weight in self.named_weights():
            if self.trains(name):
                yield name, weight

    def saved_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Buffers by Hugging Face name that belong to the weights; none beneath an adapter."""
        if self.spec.adapter is None:
            for name, buffer in saved_buffers(self.lm):
                yield self._full_name(name), buffer

    def trains(self, name: str) -> bool:
        """Whether training changes a parameter of a model that is trained."""
        if self.shape is not None:
            return self.shape.trains(name)
        return self.spec.adapter is None or is_factor(name) or name.startswith("score.")

    @property
    def adapter_targets(self) -> tuple[str, ...]:
        """Matrices of a layer that an adapter stands beside, e.g. "self_attn.q_proj"; or none."""
        if self.shape is not None:
            return () if self.shape.adapter is None else self.shape.adapter.targets
        found = (split_factor(name) for name, _ in self.named_weights())
        return tuple(dict.fromkeys(module_in_layer(one[0]) for one in found if one is not None))

    def settle(self, *, trainable: bool) -> None:
        """Ends the loading: moves all to the device, and says of what gradients are asked.

        Frozen ones lie where an earlier model of the process has the same values, if one has them.

        Args:
            trainable: Whether gradients are asked of the parameters that training changes, else of
                none.
        """
        for name, weight in self.named_weights():
            weight.requires_grad_(trainable and self.trains(name))
        if maker_without_values() is not None:
            return
        if self.mesh.fsdp.size == 1:
            frozen = [(name, one) for name, one in self.named_weights() if not one.requires_grad]
            if shared := share_base(frozen, self.device):
                logger.info(
                    "%s: %d bytes are shared with other models", type(self).__name__, shared
                )
        # Parameters that the data axis will cut stay on the meta device until then.
        self._apply(  # type: ignore[no-untyped-call]
            lambda tensor: tensor if tensor.is_meta else tensor.to(self.device)
        )

    def partial_gradients(self) -> dict[str, int]:
        """Weights whose gradient is this slice's share of a sum; see `tensor_parallel`."""
        if self.shape is None:
            return {}
        names = [name for name, _ in self.trained_weights()]
        return partial_gradients(names, self.shape, self.mesh.tp, shares_tokens=self.shares_tokens)

    def tied_weight(self) -> str | None:
        """Name of this rank's copy of an embedding that the first and the last stage both hold.

        Its gradient is the sum of both copies' gradients. None on other stages, for models that
        are not tied, and with one stage, where there is one parameter.
        """
        pp = self.mesh.pp
        if self.shape is None or not self.shape.is_tied or pp.size == 1:
            return None
        if pp.is_first:
            return EMBEDDING
        return LM_HEAD if pp.is_last else None

    def _check_last_stage(self) -> None:
        if not self.mesh.pp.is_last:
            raise ValueError(
                f"this rank has stage {self.mesh.pp.index} of {self.mesh.pp.size}: only the last "
                "stage has a head; send its hidden states to the next stage"
            )


def _sizes(config: Any, mesh: RankMesh) -> ModelSizes | None:
    """Sizes that activations grow with; None for families that do not say theirs."""
    return ModelSizes.of_config(
        config.get_text_config().to_dict(),
        num_stages=mesh.pp.size,
        num_slices=mesh.tp.size,
        num_cuts=mesh.cp.size,
    )


def _shape(auto_class: Any, config: Any, mesh: RankMesh) -> DecoderShape | None:
    """Sizes of the model; None for a family without a plan, which one rank alone can hold."""
    is_lm = auto_class is AutoModelForCausalLM
    try:
        return DecoderShape.from_config(
            config.to_dict(),
            head="lm_head" if is_lm else "score",
            num_labels=1 if is_lm else config.num_labels,
            has_head_bias=auto_class is AutoModelForTokenClassification
            and getattr(config, "token_classification_bias", True),
        )
    except RefusedSettingError:
        raise
    except UnsupportedFamilyError:
        if mesh.world.size > 1:
            raise
        return None
