"""The gateway: text in front of the scheduler. Starts in a second; never imports torch."""

import os

# Read by gRPC when it is first imported: no notices of connections that come and go, no hooks around fork (the
# template renderers are started by fork and exec).
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
