"""What a worker on a GPU does otherwise than one on a CPU."""
