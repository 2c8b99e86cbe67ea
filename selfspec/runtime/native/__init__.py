"""Native programs: a pass is captured, lowered to operations, and run by one call of selfspec's kernels."""
