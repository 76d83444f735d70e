"""Wire contracts and the small gRPC runtime that every Kvern service shares."""
