"""A causal language model on Hugging Face transformers that scores completions.

Shape letters: S packed tokens, N completion tokens, U distinct ones, D width, V vocabulary, K ids
at each place beside the token. Of rows that several ranks cut among them, S and U count this rank's
part alone; what `finish` gives is of all.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM

from rolemesh.engine.hardware.devices import kind_of
from rolemesh.engine.models.decoder import Decoder
from rolemesh.engine.models.folder import read_config
from rolemesh.engine.models.layers.rounding import rounded
from rolemesh.engine.models.vocabulary.logprobs import token_logprobs
from rolemesh.engine.models.vocabulary.top_logprobs import top_logprobs
from rolemesh.engine.packing.packed_rows import PackedRows
from rolemesh.engine.parallel.mesh import RankMesh
from rolemesh.engine.parallel.tensor_parallel import first_vocabulary_row
from rolemesh.engine.specs import ModelSpec, Numerics

COMPUTE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class TokenScores(NamedTuple):
    """What a language model says of completion tokens; a tuple, since FSDP looks into those."""

    logprobs_N: torch.Tensor
    """float32 [N], natural log."""
    entropy_N: torch.Tensor | None = None
    """float32 [N], in nats."""
    choices_NK: torch.Tensor | None = None
    """float32 [N, K], log-probs of the ids that were asked for."""
    top_ids_NK: torch.Tensor | None = None
    """int64 [N, K], the likeliest tokens, the likeliest first."""
    top_NK: torch.Tensor | None = None
    """float32 [N, K], their log-probs."""


class CausalLm(Decoder):
    """A policy or reference: float32 weights, forward passes in the spec's compute type.

    Owned by the rank's compute thread.

    Example::

        model = CausalLm(ModelSpec(path=folder), device="cpu")
        rows = pack_rows(batch, model.device)
        hidden_1SD = model.stage_forward(rows, None)  # the logits are never computed
        logprobs_N = model.finish(hidden_1SD, rows, temperature=1.0).logprobs_N
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        device: torch.device | str = "cpu",
        trainable: bool = True,
        mesh: RankMesh | None = None,
        numerics: Numerics = "exact",
    ) -> None:
        """Loads the model; see `Decoder`. Without a mesh the rank is alone.

        Raises:
            ValueError: The model needs something that the scoring here does not do.
            Exception: As `Decoder`.
        """
        super().__init__(
            AutoModelForCausalLM,
            spec,
            config=read_config(spec),
            device=device,
            mesh=mesh or RankMesh.single(),
            numerics=numerics,
            trainable=trainable,
        )
        _check_head(self.lm, self.spec)
        if self.autocasts and kind_of(self.device) == "cpu":
            # A sampler computes log-probs of the same tokens, and under autocast the two would be
            # 0.02 apart. On a GPU autocast stays: its kernels are made for bfloat16, and the
            # sampler's activations are bfloat16 there too.
            self._round_layers(trainable, narrow_gradients=True)
            self.autocasts = False
        self.settle(trainable=trainable)

    @property
    def vocabulary_VD(self) -> torch.Tensor:
        """float32 [V, D], the output embedding (the input embedding too, where tied).

        Of a frozen model maybe bfloat16. With tensor slices, this rank's rows of it. On the last
        stage alone.
        """
        weight_VD: torch.Tensor = self.lm.get_output_embeddings().weight
        return weight_VD

    def finish(
        self,
        hidden_1SD: torch.Tensor,
        rows: PackedRows,
        *,
        temperature: float,
        with_entropy: bool = False,
        choices_NK: torch.Tensor | None = None,
        top_k: int = 0,
    ) -> TokenScores:
        """Scores the completion tokens from the last stage's result; equal on all its slices.

        Args:
            hidden_1SD: From `stage_forward`, float [1, S, D].
            rows: The rows it was computed from.
            temperature: Of the softmax, > 0.
            with_entropy: Whether the entropy is wanted too.
            choices_NK: int64 [N, K], further ids to score at the place of each token; None: none.
            top_k: How many of the likeliest tokens are wanted at each place, without gradients;
                not together with an entropy or choices.

        Raises:
            ValueError: This is not the last stage.
        """
        self._check_last_stage()
        tp, vocabulary_VD = self.mesh.tp, self.vocabulary_VD
        compute_dtype = COMPUTE_DTYPES[self.spec.compute_dtype]
        if self.multiplies_in_float32:
            # The values of the sampler's weights, as in the layers.
            compute_dtype = torch.float32
            if not self.is_rounded:
                vocabulary_VD = rounded(vocabulary_VD)
        wide = torch.promote_types(vocabulary_VD.dtype, torch.float32)
        how: dict[str, Any] = {
            "temperature": temperature,
            "chunk_tokens": self.spec.logprob_chunk_tokens,
            "compute_dtype": compute_dtype,
            "group": tp,
            "first_row": 0 if self.shape is None else first_vocabulary_row(self.shape, tp),
        }
        if choices_NK is not None:
            # The ids belong to rows: those that share a token need not have the same.
            hidden_ND, ids_NJ = rows.states_by_row(hidden_1SD, choices_NK)
            logprobs_NJ, entropy_N = token_logprobs(
                hidden_ND.to(wide), vocabulary_VD, ids_NJ, with_entropy=with_entropy, **how
            )
            logprobs_NJ = rows.all_by_row(logprobs_NJ)
            if entropy_N is not None:
                entropy_N = rows.all_by_row(entropy_N)
            return TokenScores(logprobs_NJ[:, 0], entropy_N, logprobs_NJ[:, 1:])
        hidden_UD, targets_U = rows.states(hidden_1SD).to(wide), rows.targets_V
        if top_k:
            found = top_logprobs(hidden_UD, vocabulary_VD, targets_U, top_k, **how)
            logprobs_N, ids_NK, top_NK = map(rows.of_rows, found)
            return TokenScores(logprobs_N, top_ids_NK=ids_NK, top_NK=top_NK)
        logprobs_U, entropy_U = token_logprobs(
            hidden_UD, vocabulary_VD, targets_U, with_entropy=with_entropy, **how
        )
        return TokenScores(
            rows.of_rows(logprobs_U), None if entropy_U is None else rows.of_rows(entropy_U)
        )


def _check_head(lm: Any, spec: ModelSpec) -> None:
    """Refuses heads that are more than a product with the output embedding."""
    config = lm.config.get_text_config()
    extras = {
        "final_logit_softcapping": getattr(config, "final_logit_softcapping", None) is not None,
        "logits_scaling": getattr(config, "logits_scaling", 1.0) not in (None, 1.0),
        "logit_scale": getattr(config, "logit_scale", 1.0) not in (None, 1.0),
        "a bias": getattr(lm.get_output_embeddings(), "bias", None) is not None,
    }
    for extra, is_present in extras.items():
        if is_present:
            raise ValueError(
                f"model.path {str(spec.path)!r}: the output layer of {type(lm).__name__} has "
                f"{extra}, which log-probs here leave out: give another model"
            )
