"""Orthogonalisation of matrices by Newton-Schulz, as Muon does it."""

from __future__ import annotations

import torch

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic a x + b x^3 + c x^5, whose slope at 0 is steep, and which leaves singular values
between about 0.7 and 1.2 in place of 1 (Jordan et al. 2024, "Muon", section on Newton-Schulz)."""

_LEAST_NORM = 1e-7
"""A matrix with a smaller norm is divided by this one: a matrix of zeros stays one."""


def orthogonalised(matrix_RC: torch.Tensor, *, steps: int) -> torch.Tensor:
    """The matrix with its singular values near 1: of M = U S V^T about U V^T.

    X_0 = M / |M|, then in each step A = X X^T and X = a X + (b A + c A^2) X, on the shorter side
    (arXiv 2502.16982, eq. 2). What torch.optim.Muon computes, bit by bit, where the type is
    bfloat16. Coefficients are the same for each step, so that singular values go up and down
    around 1 and do not come nearer to it with more steps.

    Args:
        matrix_RC: bfloat16 or float32 [R, C], in whose type all products are.
        steps: At least 1; small singular values grow by 3.4445 in each.

    Returns:
        A new tensor like the matrix.
    """
    a, b, c = _COEFFICIENTS
    is_tall = matrix_RC.size(0) > matrix_RC.size(1)
    x_SL = matrix_RC.T if is_tall else matrix_RC  # [shorter side, longer side]
    x_SL = x_SL / x_SL.norm().clamp(min=_LEAST_NORM)
    for _ in range(steps):
        gram_SS = x_SL @ x_SL.T
        polynomial_SS = torch.addmm(gram_SS, gram_SS, gram_SS, beta=b, alpha=c)
        x_SL = torch.addmm(x_SL, polynomial_SS, x_SL, beta=a)
    return x_SL.T if is_tall else x_SL


def multiply_adds(rows: int, columns: int, *, steps: int) -> int:
    """Multiply-adds of `orthogonalised`: two products with the longer side a step, and a square."""
    short, long = sorted((rows, columns))
    return steps * (2 * short * short * long + short**3)
