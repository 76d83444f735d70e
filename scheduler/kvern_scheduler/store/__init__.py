"""The committed truth: one contract, in memory and in Redis."""
