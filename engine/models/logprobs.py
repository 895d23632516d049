"""Log-probs and entropy of given tokens, straight from hidden states, in chunks.

The logits of all tokens never exist: a chunk of rows is projected, reduced to one log-prob (and
one entropy) a row, and dropped; the backward pass projects it again. The largest temporary is
[C, V]. Where the vocabulary is cut over ranks, each works on its own rows (V is then their
number), and a few numbers a token are combined at the end: two all-reduces of at most [3, N].

Shape letters: N tokens, C tokens of a chunk, D width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from rolemesh.engine.device_kinds import kind_of
from rolemesh.engine.parallel.mesh import RankGroup
from rolemesh.engine.parallel.tensor_parallel import all_reduce


def token_logprobs(
    hidden_ND: torch.Tensor,
    vocabulary_VD: torch.Tensor,
    targets_N: torch.Tensor,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = 512,
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
        targets_N: int64 [N], token ids.
        temperature: Divides the logits, > 0.
        chunk_tokens: Most rows of logits that exist at a time.
        compute_dtype: Type of matrix products; float32 leaves float64 inputs as they are.
        with_entropy: Whether the entropy is wanted too.
        group: Ranks that cut the vocabulary among them; None where it is whole.
        first_row: Token id of the first row of vocabulary_VD.

    Returns:
        Log-probs, float [N], natural log; and the entropy, float [N], in nats, or None; equal on
        all ranks of a group. Both send gradients to hidden (the whole gradient: the backward pass
        sums the shares of the group's slices, in one all-reduce of [N, D]) and vocabulary.

    Example: hidden [[0, 0]] scores every token of a vocabulary of 4 with -log 4 = -1.386, and
    has entropy 1.386.
    """
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}: give a positive number")
    logprobs_N, entropy_N = _ChunkedLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_ND,
        vocabulary_VD,
        targets_N,
        temperature,
        chunk_tokens,
        compute_dtype,
        with_entropy,
        _Slice(group, first_row, len(vocabulary_VD)) if group and group.size > 1 else None,
    )
    return logprobs_N, (entropy_N if with_entropy else None)


class _ChunkedLogprobs(torch.autograd.Function):
    """Forward in chunks, backward in the same chunks with the logits computed again.

    With z the logits after temperature, p = softmax(z), L the log-sum-exp and H the entropy:

        logprob = z[target] - L          d logprob / d z_j = [j = target] - p_j
        H = L - sum_j p_j z_j            d H / d z_j       = -p_j (z_j - L + H)
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        vocabulary_VD: torch.Tensor,
        targets_N: torch.Tensor,
        temperature: float,
        chunk_tokens: int,
        compute_dtype: torch.dtype,
        with_entropy: bool,
        vocabulary: _Slice | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        project = _Projection(vocabulary_VD, compute_dtype, temperature)
        scores = _scores if vocabulary is None else vocabulary.scores
        with project.without_autocast():
            logprobs_N, lse_N, entropy_N = scores(
                project, hidden_ND, targets_N, chunk_tokens, with_entropy
            )
        ctx.save_for_backward(hidden_ND, vocabulary_VD, targets_N, lse_N, entropy_N)
        ctx.arguments = (temperature, chunk_tokens, compute_dtype, with_entropy, vocabulary)
        if not with_entropy:
            ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs_N: torch.Tensor, grad_entropy_N: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        hidden_ND, vocabulary_VD, targets_N, lse_N, entropy_N = ctx.saved_tensors
        temperature, chunk_tokens, compute_dtype, with_entropy, vocabulary = ctx.arguments
        project = _Projection(vocabulary_VD, compute_dtype, temperature)
        need_hidden, need_vocabulary = ctx.needs_input_grad[:2]
        grad_hidden_ND = torch.empty_like(hidden_ND) if need_hidden else None
        grad_vocabulary_VD = (
            torch.zeros_like(vocabulary_VD, dtype=project.accumulate_dtype)
            if need_vocabulary
            else None
        )
        with project.without_autocast():
            for chunk in _chunks(len(hidden_ND), chunk_tokens):
                logits_CV = project(hidden_ND[chunk])
                lse_C1 = lse_N[chunk, None]
                grad_C1 = grad_logprobs_N[chunk, None]
                if with_entropy:
                    logits_CV.sub_(lse_C1)  # log-probs of the whole vocabulary
                    probs_CV = logits_CV.exp()
                    # -p (g + h (log p + H)), written in the place of the logits
                    grad_CV = logits_CV.add_(entropy_N[chunk, None])
                    grad_CV.mul_(grad_entropy_N[chunk, None]).add_(grad_C1).mul_(probs_CV).neg_()
                    del probs_CV
                else:
                    grad_CV = logits_CV.sub_(lse_C1).exp_().mul_(grad_C1).neg_()
                if vocabulary is None:
                    grad_CV.scatter_add_(1, targets_N[chunk, None], grad_C1)
                else:
                    vocabulary.add_at_targets(grad_CV, targets_N[chunk], grad_C1)
                grad_CV = project.to_compute(grad_CV.div_(temperature))
                if grad_hidden_ND is not None:
                    grad_hidden_ND[chunk] = project.product(grad_CV, project.vocabulary_VD)
                if grad_vocabulary_VD is not None:
                    project.add_product(
                        grad_vocabulary_VD, grad_CV.t(), project.to_compute(hidden_ND[chunk])
                    )
        if grad_vocabulary_VD is not None:
            grad_vocabulary_VD = grad_vocabulary_VD.to(vocabulary_VD.dtype)
        if vocabulary is not None and grad_hidden_ND is not None:
            grad_hidden_ND = all_reduce(grad_hidden_ND, vocabulary.group)
        return grad_hidden_ND, grad_vocabulary_VD, None, None, None, None, None, None


class _Slice:
    """This rank's rows of a vocabulary that a group cuts."""

    def __init__(self, group: RankGroup, first_row: int, num_rows: int) -> None:
        self.group = group
        self._first_row = first_row
        self._num_rows = num_rows

    def scores(
        self,
        project: _Projection,
        hidden_ND: torch.Tensor,
        targets_N: torch.Tensor,
        chunk_tokens: int,
        with_entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As `_scores`, over the slices of all ranks of the group."""
        largest_N = hidden_ND.new_empty(len(hidden_ND), dtype=project.accumulate_dtype)
        sums_3N = largest_N.new_empty(3, len(hidden_ND))
        for chunk in _chunks(len(hidden_ND), chunk_tokens):
            sums_3N[:, chunk], largest_N[chunk] = self._sums(
                project(hidden_ND[chunk]), targets_N[chunk]
            )
        logprobs_N, lse_N, entropy_N = self._combine(sums_3N, largest_N)
        return logprobs_N, lse_N, entropy_N if with_entropy else entropy_N[:0]

    def _sums(
        self, logits_CV: torch.Tensor, targets_C: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the slice contributes, with m its largest logit. Overwrites the logits.

        Returns:
            [3, C]: sum exp(z - m); sum (z - m) exp(z - m); the target's logit, or 0 where another
            slice has it. And m, [C].
        """
        if not self._num_rows:
            lowest = torch.finfo(logits_CV.dtype).min
            num_tokens = len(logits_CV)
            return logits_CV.new_zeros(3, num_tokens), logits_CV.new_full((num_tokens,), lowest)
        row_C1, is_own_C = self._rows(targets_C)
        target_C = logits_CV.gather(1, row_C1).squeeze(1).mul_(is_own_C)
        largest_C = logits_CV.amax(1)
        shifted_CV = logits_CV.sub_(largest_C[:, None])
        exps_CV = shifted_CV.exp()
        sums_3C = torch.stack([exps_CV.sum(1), shifted_CV.mul_(exps_CV).sum(1), target_C])
        return sums_3C, largest_C

    def _combine(
        self, sums_3N: torch.Tensor, largest_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Log-probs, log-sum-exp and entropy, [N] each, from the sums of all slices."""
        highest_N = all_reduce(largest_N, self.group, dist.ReduceOp.MAX)
        below_N = largest_N - highest_N
        exps_N, products_N, target_N = sums_3N
        # Both sums as if the largest logit of all had been subtracted.
        moved_3N = torch.stack(
            [
                below_N.exp() * exps_N,
                below_N.exp() * (products_N + below_N * exps_N),
                target_N,
            ]
        )
        exps_N, products_N, target_N = all_reduce(moved_3N, self.group)
        log_N = exps_N.log()
        lse_N = highest_N + log_N
        return target_N - lse_N, lse_N, log_N - products_N / exps_N

    def add_at_targets(
        self, grad_CV: torch.Tensor, targets_C: torch.Tensor, grad_C1: torch.Tensor
    ) -> None:
        """Adds a number to each target's entry, where this slice has it."""
        if self._num_rows:
            row_C1, is_own_C = self._rows(targets_C)
            grad_CV.scatter_add_(1, row_C1, grad_C1 * is_own_C[:, None])

    def _rows(self, targets_C: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of targets in this slice, int64 [C, 1], and which targets it has, bool [C]."""
        row_C = targets_C - self._first_row
        is_own_C = (row_C >= 0) & (row_C < self._num_rows)
        return row_C.where(is_own_C, 0)[:, None], is_own_C


class _Projection:
    """Products with the vocabulary matrix, cast once for all chunks."""

    def __init__(
        self, vocabulary_VD: torch.Tensor, compute_dtype: torch.dtype, temperature: float
    ) -> None:
        self.accumulate_dtype = torch.promote_types(vocabulary_VD.dtype, torch.float32)
        self._dtype = torch.bfloat16 if compute_dtype == torch.bfloat16 else self.accumulate_dtype
        self._temperature = temperature
        self._device_type = vocabulary_VD.device.type
        self._has_wide_output = (
            self._dtype == torch.bfloat16 and kind_of(vocabulary_VD.device) == "cuda"
        )
        self.vocabulary_VD = self.to_compute(vocabulary_VD.detach())
        # torch's CPU kernels have no bfloat16 product with a float32 result (2.13). Products of
        # bfloat16 numbers are exact in float32, so there the rounded factors are multiplied in
        # float32. SmolLM2-135M, sampled tokens: mean error of a log-prob 0.013, against 0.025.
        self._logit_factor_VD = (
            self.vocabulary_VD
            if self._has_wide_output
            else self.vocabulary_VD.to(self.accumulate_dtype)
        )

    def __call__(self, hidden_CD: torch.Tensor) -> torch.Tensor:
        """Logits after temperature, [C, V]; the caller may write into them."""
        factor_CD = (
            self.to_compute(hidden_CD)
            if self._has_wide_output
            else hidden_CD.to(self.accumulate_dtype)
        )
        logits_CV = self.product(factor_CD, self._logit_factor_VD.t())
        return logits_CV if self._temperature == 1.0 else logits_CV.div_(self._temperature)

    def to_compute(self, tensor: torch.Tensor) -> torch.Tensor:
        """Casts an operand to the type of products."""
        return tensor.to(self._dtype)

    def product(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """The matrix product, given in the accumulation type.

        On a CPU a bfloat16 product is rounded to bfloat16 first, which gradients can bear.
        """
        if self._has_wide_output:
            return torch.mm(left, right, out_dtype=self.accumulate_dtype)
        return torch.mm(left, right).to(self.accumulate_dtype)

    def add_product(self, total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
        """Adds a product to a total in the accumulation type."""
        if self._dtype == total.dtype:
            total.addmm_(left, right)
        else:
            total += self.product(left, right)

    def without_autocast(self) -> torch.autocast:
        """Types are chosen here; an autocast around the caller must not choose others."""
        return torch.autocast(self._device_type, enabled=False)


def _scores(
    project: _Projection,
    hidden_ND: torch.Tensor,
    targets_N: torch.Tensor,
    chunk_tokens: int,
    with_entropy: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probs [N], log-sum-exp [N] and entropy [N] ([0] where not wanted)."""
    logprobs_N = hidden_ND.new_empty(len(hidden_ND), dtype=project.accumulate_dtype)
    lse_N = torch.empty_like(logprobs_N)
    entropy_N = torch.empty_like(logprobs_N if with_entropy else logprobs_N[:0])
    for chunk in _chunks(len(hidden_ND), chunk_tokens):
        logits_CV = project(hidden_ND[chunk])
        targets_C1 = targets_N[chunk, None]
        target_C = logits_CV.gather(1, targets_C1).squeeze(1)
        probs_CV, lse_C = _softmax_and_lse(logits_CV)
        lse_N[chunk] = lse_C
        logprobs_N[chunk] = target_C - lse_C
        if with_entropy:
            entropy_N[chunk] = lse_C - logits_CV.mul_(probs_CV).sum(1)
    return logprobs_N, lse_N, entropy_N


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
