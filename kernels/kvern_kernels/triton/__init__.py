"""GPU kernels in Triton, for NVIDIA (sm_80, sm_90, sm_100) and AMD (gfx942).

Importing this package is cheap; `ops` is the backend that the dispatcher loads. Each module holds
jitted kernels, their launchers with the signatures of `kvern_kernels.reference`, and `production()`:
the calls whose compilations `aot` checks on machines without a GPU. See README.md beside this file.
"""
