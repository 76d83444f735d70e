"""LoRA adapters (arXiv 2106.09685) on a worker: read from files, kept in slots, added to the outputs of linear layers."""
