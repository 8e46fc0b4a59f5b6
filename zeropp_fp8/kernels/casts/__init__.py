"""From a matrix to the operands of its products, as it is and transposed, in one read."""
