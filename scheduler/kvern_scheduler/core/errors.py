"""What the core says when it refuses or fails a request."""

from __future__ import annotations

from kvern.v1 import error_pb2
from kvern.v1.error_pb2 import ErrorCode


class RequestError(Exception):
    """A refusal, or the end of one request: what was wrong, the value, the limit, what to do."""

    def __init__(
        self,
        code: ErrorCode.ValueType,
        message: str,
        *,
        field: str = "",
        value: object = "",
        limit: object = "",
        retry_after_ms: int = 0,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.field = field
        self.value = str(value)
        self.limit = str(limit)
        self.retry_after_ms = retry_after_ms

    def to_pb(self) -> error_pb2.Error:
        return error_pb2.Error(
            code=self.code,
            message=self.message,
            field=self.field,
            value=self.value,
            limit=self.limit,
            retry_after_ms=self.retry_after_ms,
        )


class ProtocolError(Exception):
    """A worker answered something that no plan asked for: its batch can no longer be trusted."""


class IntegrityError(AssertionError):
    """The accounting of blocks, slots or queues contradicts itself."""


def invalid(field: str, message: str, *, value: object = "", limit: object = "") -> RequestError:
    return RequestError(error_pb2.ERROR_CODE_INVALID_ARGUMENT, message, field=field, value=value, limit=limit)
