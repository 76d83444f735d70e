"""Building blocks of the models, on kvern_kernels operations only."""
