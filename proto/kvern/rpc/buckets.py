"""Histogram bounds, and the labels, of vLLM's metrics, so that its dashboards and alerts work unchanged.

A name is exported by one service only: what a client sees by the gateway, what happens inside by the scheduler.
"""

LABELS = ("model_name", "engine")

# fmt: off
TIME_TO_FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)
INTER_TOKEN = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)
REQUEST_SECONDS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0,
    7680.0,
)
# fmt: on
TOKENS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))
COUNTS = (1.0, 2.0, 5.0, 10.0, 20.0)
