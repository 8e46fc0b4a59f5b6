"""Which shape a weight has. What follows from it is decided elsewhere; that there are these, here only.

* a matrix [out, in] of a linear layer or an embedding: quantized, and an operand of a GEMM;
* a stack of matrices, of packed experts or a convolution: quantized as well;
* a vector, of a norm or a bias: in high precision everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def is_vector(shape: Sequence[int]) -> bool:
    """Whether a tensor of this shape is neither a matrix nor a stack of them."""
    return len(shape) < 2


def is_matrix(shape: Sequence[int]) -> bool:
    """Whether it is one matrix."""
    return len(shape) == 2


def one_matrix(shape: Sequence[int]) -> tuple[int, int]:
    """(rows, columns) of a matrix; of a stack with the rows of all its matrices, one after the other."""
    return math.prod(shape[:-1]), shape[-1]


def is_stack(shape: Sequence[int]) -> bool:
    """Whether it is a stack of matrices, such as packed experts [experts, out, in]."""
    return len(shape) == 3


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """(rows, columns) of the matrices in a stack of packed experts [experts, out, in]; else of the one matrix that a
    tensor is, of a convolution with a filter per row."""
    return (shape[1], shape[2]) if is_stack(shape) else (shape[0], math.prod(shape[1:]))
