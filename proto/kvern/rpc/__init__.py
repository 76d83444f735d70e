"""The gRPC runtime that the services share: channels, servers, health, drain, errors, packing."""
