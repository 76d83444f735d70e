"""What breaks a group's batch, or shows that the core contradicts itself. Refusals are kvern.errors.KvernError."""


class ProtocolError(Exception):
    """A worker answered something that no plan asked for: its batch can no longer be trusted."""


class IntegrityError(AssertionError):
    """The accounting of blocks, slots or queues contradicts itself."""
