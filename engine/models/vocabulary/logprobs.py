"""Log-probs and entropy of given tokens, straight from hidden states, in chunks.

The logits of all tokens never exist: a chunk of rows is projected, reduced to one log-prob (and
one entropy) a row, and dropped; the backward pass projects it again. The largest temporaries are
two of [C, V]. The last chunk, on a CPU the last few, are kept for the backward pass: one product of
four less. Where the vocabulary is cut over ranks, each works on its own rows (V is then their
number), and a few numbers a token are combined at the end: two all-reduces of at most [3, N].

Where `kernels/choice.py` says so, Triton's kernels compute the same (`kernels/linear_logprobs.py`).
There no logits exist at all; the backward pass goes by blocks of the vocabulary, so that each part
of its gradient is written once.

Shape letters: N tokens, C tokens of a chunk, D width, V vocabulary, J ids to score at each place.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import torch

from rolemesh.engine.hardware.devices import kind_of
from rolemesh.engine.kernels.choice import triton_serves
from rolemesh.engine.models.vocabulary.matrix import Projection, VocabularySlice, scores_of_sums
from rolemesh.engine.parallel.mesh import RankGroup
from rolemesh.engine.parallel.tensor_parallel import all_reduce

CPU_CHUNK_TOKENS = 512
"""Rows of logits that exist at a time on a CPU, unless a number is given."""
CPU_KEPT_ELEMENTS = 2**27
"""Logits that a CPU keeps for the backward pass where the recipe gives no number: 512 MiB."""
GPU_CHUNK_ELEMENTS = 2**28
"""Logits that exist at a time on a GPU, unless a number of rows is given: 1 GiB of float32. There
small chunks read and write the gradient of the vocabulary, float32 [V, D], more often than the
products take."""
BLOCK_COLUMNS = 128
"""Blocks of the vocabulary are multiples of it: cuBLAS wants columns that are aligned."""


def token_logprobs(
    hidden_ND: torch.Tensor,
    vocabulary_VD: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
    compute_dtype: torch.dtype = torch.float32,
    with_entropy: bool = False,
    group: RankGroup | None = None,
    first_row: int = 0,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scores target tokens under softmax(hidden @ vocabulary.T / temperature).

    With bfloat16 the vocabulary is rounded to bfloat16, and on a GPU the states too (on a CPU only
    in the backward pass; see `rounding`). Logits are float32 all the same (rounded, a logit of 20
    would move in steps of 1/8), and so are log-sum-exp, softmax and everything summed over chunks.

    Args:
        hidden_ND: float32 (or float64) [N, D], the state before each target; equal on all ranks
            of a group.
        vocabulary_VD: float32 (or float64) [V, D], the output embedding, or this rank's rows of it
            (there may be none).
        targets: int64 [N], token ids, or [N, J], several at each place.
        temperature: Divides the logits, > 0.
        chunk_tokens: Most rows of logits that are computed at a time, and kept, or as many numbers
            in blocks of another shape; None: as many as suit the device.
        compute_dtype: Type of matrix products; float32 leaves float64 inputs as they are.
        with_entropy: Whether the entropy is wanted too.
        group: Ranks that cut the vocabulary among them; None where it is whole.
        first_row: Token id of the first row of vocabulary_VD.

    Returns:
        Log-probs, float of the shape of the targets, natural log; and the entropy, float [N], in
        nats, or None; equal on all ranks of a group. Both send gradients to hidden (the whole
        gradient: the backward pass sums the shares of the group's slices, in one all-reduce of
        [N, D]) and vocabulary.

    Example: hidden [[0, 0]] scores every token of a vocabulary of 4 with -log 4 = -1.386, and
    has entropy 1.386.
    """
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}: give a positive number")
    rows = (
        VocabularySlice(group, first_row, len(vocabulary_VD)) if group and group.size > 1 else None
    )
    # The kernels score one id a place.
    is_fused = (
        triton_serves(hidden_ND.device)
        and vocabulary_VD.dtype != torch.float64
        and targets.dim() == 1
    )
    compute: Any = _FusedLogprobs if is_fused else _ChunkedLogprobs
    logprobs_NJ, entropy_N = compute.apply(
        hidden_ND,
        vocabulary_VD,
        targets if targets.dim() == 2 else targets[:, None],
        temperature,
        chunk_tokens or default_chunk_tokens(vocabulary_VD),
        chunk_tokens or default_kept_tokens(vocabulary_VD),
        compute_dtype,
        with_entropy,
        rows,
    )
    return logprobs_NJ.reshape(targets.shape), (entropy_N if with_entropy else None)


def default_chunk_tokens(vocabulary_VD: torch.Tensor) -> int:
    """Rows of logits that exist at a time where the recipe gives no number."""
    if kind_of(vocabulary_VD.device) == "cpu":
        return CPU_CHUNK_TOKENS
    return max(1, GPU_CHUNK_ELEMENTS // max(1, len(vocabulary_VD)))


def default_kept_tokens(vocabulary_VD: torch.Tensor) -> int:
    """Rows of logits that are kept for the backward pass where the recipe gives no number.

    A chunk adds nothing to the peak: the forward pass has two at a time.
    """
    if kind_of(vocabulary_VD.device) == "cpu":
        return max(CPU_CHUNK_TOKENS, CPU_KEPT_ELEMENTS // max(1, len(vocabulary_VD)))
    return default_chunk_tokens(vocabulary_VD)


class _Others(NamedTuple):
    """What tokens other than a place's target have of its softmax."""

    sum_ND: torch.Tensor
    """Their rows of the vocabulary, each times its probability, summed."""
    share_N1: torch.Tensor
    """Their probabilities, summed: as exact as a target that is nearly certain needs it."""

    @classmethod
    def like(cls, hidden_ND: torch.Tensor) -> Self:
        """Not filled."""
        return cls(torch.empty_like(hidden_ND), hidden_ND.new_empty(len(hidden_ND), 1))


class _Kept:
    """Logits of the last chunks of a pass, for its backward pass, which uses them up."""

    def __init__(self, first: int) -> None:
        """Keeps chunks that begin at a row, or after it."""
        self._first = first
        self._by_start: dict[int, torch.Tensor] = {}

    def keep(self, chunk: slice, logits_CV: torch.Tensor) -> None:
        """Takes a chunk's logits, if they are to be kept."""
        if chunk.start >= self._first:
            self._by_start[chunk.start] = logits_CV

    def taken(self, chunk: slice) -> torch.Tensor | None:
        """A chunk's logits, to write into, where they were kept and nobody took them."""
        return self._by_start.pop(chunk.start, None)


class _ChunkedLogprobs(torch.autograd.Function):
    """Forward in chunks, backward in the same chunks; logits not kept are computed again.

    With z the logits after temperature, p = softmax(z), L the log-sum-exp and H the entropy:

        logprob = z[target] - L          d logprob / d z_j = [j = target] - p_j
        H = L - sum_j p_j z_j            d H / d z_j       = -p_j (z_j - L + H)

    A vocabulary that is not trained, as beneath an adapter, needs no logits in the backward pass.
    With w_j its rows, T the temperature, and sums over all j but the target:

        d logprob / d hidden = (w_target sum_j p_j - sum_j p_j w_j) / T

    The forward pass, which has p, makes the second sum: one product of three less.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        vocabulary_VD: torch.Tensor,
        targets_NJ: torch.Tensor,
        temperature: float,
        chunk_tokens: int,
        kept_tokens: int,
        compute_dtype: torch.dtype,
        with_entropy: bool,
        vocabulary: VocabularySlice | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        project = Projection(vocabulary_VD, compute_dtype, temperature)
        # A slice of the vocabulary has no p before the slices have told their sums.
        is_frozen = ctx.needs_input_grad[0] and not ctx.needs_input_grad[1]
        keeps_others = is_frozen and vocabulary is None and targets_NJ.shape[1] == 1
        others = _Others.like(hidden_ND) if keeps_others else None
        # What needs no gradient keeps nothing.
        num_kept = kept_tokens if any(ctx.needs_input_grad) and others is None else 0
        ctx.kept = _Kept(len(hidden_ND) - num_kept)
        with project.without_autocast():
            logprobs_NJ, lse_N, entropy_N = _scores(
                *(project, hidden_ND, targets_NJ, chunk_tokens, with_entropy, vocabulary, others),
                ctx.kept,
            )
        ctx.save_for_backward(
            *(hidden_ND, vocabulary_VD, targets_NJ, lse_N, entropy_N),
            *((None, None) if others is None else others),
        )
        ctx.arguments = (temperature, chunk_tokens, compute_dtype, vocabulary)
        # What no loss reads gets None: the gradient of an entropy costs passes over the logits.
        ctx.set_materialize_grads(False)
        if not with_entropy:
            ctx.mark_non_differentiable(entropy_N)
        return logprobs_NJ, entropy_N

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs_NJ: torch.Tensor | None, grad_entropy_N: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden_ND, vocabulary_VD, targets_NJ, lse_N, entropy_N, *others = ctx.saved_tensors
        temperature, chunk_tokens, compute_dtype, vocabulary = ctx.arguments
        if grad_logprobs_NJ is None:
            grad_logprobs_NJ = lse_N.new_zeros(targets_NJ.shape)
        if others[0] is not None and grad_entropy_N is None:
            rows_ND, (sum_ND, share_N1) = vocabulary_VD[targets_NJ[:, 0]], others
            if compute_dtype == torch.bfloat16:
                rows_ND = rows_ND.bfloat16()
            grad_ND = (rows_ND * share_N1).sub_(sum_ND).mul_(grad_logprobs_NJ / temperature)
            return grad_ND, *(None,) * 8
        project = Projection(vocabulary_VD, compute_dtype, temperature)
        need_hidden, need_vocabulary = ctx.needs_input_grad[:2]
        grad_hidden_ND = torch.empty_like(hidden_ND) if need_hidden else None
        grad_vocabulary_VD = (
            torch.empty_like(vocabulary_VD, dtype=project.accumulate_dtype)
            if need_vocabulary
            else None
        )
        if grad_vocabulary_VD is not None and not len(hidden_ND):
            grad_vocabulary_VD.zero_()
        with project.without_autocast():
            for chunk in _chunks(len(hidden_ND), chunk_tokens):
                logits_CV = ctx.kept.taken(chunk)
                if logits_CV is None:
                    logits_CV = project(hidden_ND[chunk])
                lse_C1 = lse_N[chunk, None]
                grad_CJ = grad_logprobs_NJ[chunk]
                grad_C1 = grad_CJ.sum(1, keepdim=True)
                if grad_entropy_N is not None:
                    logits_CV.sub_(lse_C1)  # log-probs of the whole vocabulary
                    probs_CV = logits_CV.exp()
                    # -p (g + h (log p + H)), written in the place of the logits
                    grad_CV = logits_CV.add_(entropy_N[chunk, None])
                    grad_CV.mul_(grad_entropy_N[chunk, None]).add_(grad_C1).mul_(probs_CV).neg_()
                    del probs_CV
                else:
                    grad_CV = logits_CV.sub_(lse_C1).exp_().mul_(grad_C1).neg_()
                if vocabulary is None:
                    grad_CV.scatter_add_(1, targets_NJ[chunk], grad_CJ)
                else:
                    vocabulary.add_at_targets(grad_CV, targets_NJ[chunk], grad_CJ)
                grad_CV = project.to_compute(grad_CV.div_(temperature))
                if grad_hidden_ND is not None:
                    grad_hidden_ND[chunk] = project.product(grad_CV, project.vocabulary_VD)
                if grad_vocabulary_VD is not None:
                    # The first chunk writes: zeros to add to are as many bytes as the vocabulary.
                    put = project.add_product if chunk.start else project.write_product
                    put(grad_vocabulary_VD, grad_CV.t(), project.to_compute(hidden_ND[chunk]))
        if grad_vocabulary_VD is not None:
            grad_vocabulary_VD = grad_vocabulary_VD.to(vocabulary_VD.dtype)
        if vocabulary is not None and grad_hidden_ND is not None:
            grad_hidden_ND = all_reduce(grad_hidden_ND, vocabulary.group)
        return grad_hidden_ND, grad_vocabulary_VD, *(None,) * 7


class _FusedLogprobs(torch.autograd.Function):
    """The same by Triton's kernels; float32 sums, at any type of products."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        vocabulary_VD: torch.Tensor,
        targets_N1: torch.Tensor,
        temperature: float,
        chunk_tokens: int,
        kept_tokens: int,
        compute_dtype: torch.dtype,
        with_entropy: bool,
        vocabulary: VocabularySlice | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from rolemesh.engine.kernels.linear_logprobs import partial_sums

        project = Projection(vocabulary_VD, compute_dtype, temperature)
        sums_3N, largest_N = partial_sums(
            project.to_compute(hidden_ND).contiguous(),
            project.vocabulary_VD.contiguous(),
            targets_N1[:, 0],
            temperature=temperature,
            first_row=0 if vocabulary is None else vocabulary.first_row,
        )
        logprobs_N1, lse_N, entropy_N = scores_of_sums(
            sums_3N, largest_N, None if vocabulary is None else vocabulary.group
        )
        ctx.save_for_backward(hidden_ND, vocabulary_VD, targets_N1, lse_N, entropy_N)
        ctx.arguments = (temperature, chunk_tokens, compute_dtype, vocabulary)
        ctx.set_materialize_grads(False)
        if not with_entropy:
            ctx.mark_non_differentiable(entropy_N)
        return logprobs_N1, entropy_N

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs_N1: torch.Tensor | None, grad_entropy_N: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        from rolemesh.engine.kernels.linear_logprobs import logit_gradients

        hidden_ND, vocabulary_VD, targets_N1, lse_N, entropy_N = ctx.saved_tensors
        temperature, chunk_tokens, compute_dtype, vocabulary = ctx.arguments
        grad_logprobs_N = (
            torch.zeros_like(lse_N) if grad_logprobs_N1 is None else grad_logprobs_N1[:, 0]
        )
        project = Projection(vocabulary_VD, compute_dtype, temperature)
        factor_ND = project.to_compute(hidden_ND).contiguous()
        rows_VD = project.vocabulary_VD.contiguous()
        need_hidden, need_vocabulary = ctx.needs_input_grad[:2]
        wide = project.accumulate_dtype
        grad_hidden_ND = torch.zeros_like(hidden_ND, dtype=wide) if need_hidden else None
        grad_vocabulary_VD = torch.zeros_like(rows_VD, dtype=wide) if need_vocabulary else None
        first_row = 0 if vocabulary is None else vocabulary.first_row
        with project.without_autocast():
            for block in _blocks(len(rows_VD), chunk_tokens * len(rows_VD), len(hidden_ND)):
                grad_NW = logit_gradients(
                    factor_ND,
                    rows_VD[block],
                    targets_N1[:, 0],
                    lse_N,
                    grad_logprobs_N,
                    None if grad_entropy_N is None else entropy_N,
                    grad_entropy_N,
                    temperature=temperature,
                    first_row=first_row + block.start,
                )
                if grad_hidden_ND is not None:
                    project.add_product(grad_hidden_ND, grad_NW, rows_VD[block])
                if grad_vocabulary_VD is not None:
                    project.write_product(grad_vocabulary_VD[block], grad_NW.t(), factor_ND)
        if grad_vocabulary_VD is not None:
            grad_vocabulary_VD = grad_vocabulary_VD.to(vocabulary_VD.dtype)
        if grad_hidden_ND is not None:
            if vocabulary is not None:
                grad_hidden_ND = all_reduce(grad_hidden_ND, vocabulary.group)
            grad_hidden_ND = grad_hidden_ND.to(hidden_ND.dtype)
        return grad_hidden_ND, grad_vocabulary_VD, *(None,) * 7


def _blocks(num_rows: int, max_elements: int, num_tokens: int) -> list[slice]:
    """Rows of the vocabulary whose gradients, for all tokens, are at most so many elements."""
    if not num_tokens:
        return []
    width = max(BLOCK_COLUMNS, max_elements // num_tokens // BLOCK_COLUMNS * BLOCK_COLUMNS)
    return [slice(at, min(at + width, num_rows)) for at in range(0, num_rows, width)]


def _scores(
    project: Projection,
    hidden_ND: torch.Tensor,
    targets_NJ: torch.Tensor,
    chunk_tokens: int,
    with_entropy: bool,
    vocabulary: VocabularySlice | None,
    others: _Others | None,
    kept: _Kept,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probs [N, J], log-sum-exp [N] and entropy [N] ([0] where not wanted).

    Fills `others`, and gives `kept` a whole vocabulary's logits: a slice's are written over.
    """
    lse_N = hidden_ND.new_empty(len(hidden_ND), dtype=project.accumulate_dtype)
    if vocabulary is not None:
        largest_N = torch.empty_like(lse_N)
        sums_SN = lse_N.new_empty(2 + targets_NJ.shape[1], len(hidden_ND))
        for chunk in _chunks(len(hidden_ND), chunk_tokens):
            sums_SN[:, chunk], largest_N[chunk] = vocabulary.sums(
                project(hidden_ND[chunk]), targets_NJ[chunk]
            )
        logprobs_NJ, lse_N, entropy_N = scores_of_sums(sums_SN, largest_N, vocabulary.group)
        return logprobs_NJ, lse_N, entropy_N if with_entropy else entropy_N[:0]
    logprobs_NJ = lse_N.new_empty(targets_NJ.shape)
    entropy_N = torch.empty_like(lse_N if with_entropy else lse_N[:0])
    for chunk in _chunks(len(hidden_ND), chunk_tokens):
        logits_CV = project(hidden_ND[chunk])
        target_CJ = logits_CV.gather(1, targets_NJ[chunk])
        probs_CV, lse_C = _softmax_and_lse(logits_CV)
        lse_N[chunk] = lse_C
        logprobs_NJ[chunk] = target_CJ - lse_C[:, None]
        if others is None:
            kept.keep(chunk, logits_CV)
            if with_entropy:
                entropy_N[chunk] = lse_C - probs_CV.mul_(logits_CV).sum(1)
        else:
            if with_entropy:
                entropy_N[chunk] = lse_C - logits_CV.mul_(probs_CV).sum(1)
            del logits_CV
            probs_CV.scatter_(1, targets_NJ[chunk], 0.0)
            others.share_N1[chunk] = probs_CV.sum(1, keepdim=True)
            factor_CV = project.to_compute(probs_CV)
            others.sum_ND[chunk] = project.product(factor_CV, project.vocabulary_VD)
    return logprobs_NJ, lse_N, entropy_N


def _softmax_and_lse(logits_CV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax [C, V] and log-sum-exp [C], from one pass of exponentials.

    The largest probability is 1 / sum exp(z - max), so lse = max - log p_max; p_max is at least
    1 / V, which makes this as exact as summing. torch.logsumexp takes six times as long (measured
    on a CPU, 512 x 49152).
    """
    probs_CV = torch.softmax(logits_CV, 1)
    largest_C, index_C = logits_CV.max(1)
    return probs_CV, largest_C - probs_CV.gather(1, index_C[:, None]).squeeze(1).log()


def _chunks(num_tokens: int, chunk_tokens: int) -> list[slice]:
    return [slice(at, at + chunk_tokens) for at in range(0, num_tokens, chunk_tokens)]
