"""Checkpoints of every format, read tensor by tensor into the model's own layout."""
