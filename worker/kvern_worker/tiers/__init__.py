"""KV blocks below the device: in memory, and on disk."""
