"""One exception for everything that a caller should be told; nothing of gRPC, so that the scheduler's core has it too."""

from __future__ import annotations

from kvern.v1 import error_pb2
from kvern.v1.error_pb2 import ErrorCode


class KvernError(Exception):
    """What was wrong, the value, the limit, what to do: as :class:`kvern.v1.error_pb2.Error` says it."""

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

    @classmethod
    def from_pb(cls, error: error_pb2.Error) -> KvernError:
        return cls(
            error.code,
            error.message,
            field=error.field,
            value=error.value,
            limit=error.limit,
            retry_after_ms=error.retry_after_ms,
        )

    def to_pb(self) -> error_pb2.Error:
        return error_pb2.Error(
            code=self.code,
            message=self.message,
            field=self.field,
            value=self.value,
            limit=self.limit,
            retry_after_ms=self.retry_after_ms,
        )


def invalid(field: str, message: str, *, value: object = "", limit: object = "") -> KvernError:
    """The commonest error: a field of the request is wrong."""
    return KvernError(error_pb2.ERROR_CODE_INVALID_ARGUMENT, message, field=field, value=value, limit=limit)
