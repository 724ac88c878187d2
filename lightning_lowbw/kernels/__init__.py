"""Numeric kernels. `reference` is plain torch and the specification; faster twins carry the same names."""
