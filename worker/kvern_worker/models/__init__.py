"""Model code: one readable file per family, on kvern_kernels operations."""
