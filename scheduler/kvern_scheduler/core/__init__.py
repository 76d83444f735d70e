"""The scheduler's pure core: requests, block pools, plans. No grpc, redis, torch, clock or randomness."""
