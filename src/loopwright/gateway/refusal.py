"""Refusals: requests that the gateway does not serve, as an HTTP status and a kind of error."""

from loopwright.core.errors import LoopwrightError, StorageError
from loopwright.engines.base import BadSampling, ContextFull, EngineError
from loopwright.gateway.dialects.fields import BadRequest, StateNotFound
from loopwright.gateway.sessions.session import BudgetSpent


class Refusal(LoopwrightError, PermissionError):
    """A request is refused. `retry` is False if an SDK would retry it in vain."""

    def __init__(self, status: int, kind: str, message: str, *, param: str | None = None, retry: bool = True) -> None:
        super().__init__(message)
        self.status, self.kind, self.param, self.retry = status, kind, param, retry

    @classmethod
    def closed(cls, id: str, status: str) -> "Refusal":
        """The session accepts no more calls. SDKs retry a 409 unless they are told not to."""
        return cls(409, "closed", f"session {id!r} is {status}; it accepts no more calls", retry=False)

    @classmethod
    def wrong_key(cls) -> "Refusal":
        """The key may not use this session."""
        return cls(401, "authentication", "the API key is not the one of this session", retry=False)

    @classmethod
    def too_large(cls, limit_bytes: int) -> "Refusal":
        """A body exceeds the limit of its route."""
        message = f"the request is larger than {limit_bytes} bytes; this route accepts no more"
        return cls(413, "too_large", message, retry=False)

    @classmethod
    def out_of_quota(cls, reason: str) -> "Refusal":
        """A quota is used up, and will not be refilled."""
        return cls(429, "quota", f"this session has reached its limits: {reason}", retry=False)


def refusal_of(error: Exception) -> Refusal:
    """The refusal for an error; unexpected errors are not shown to clients."""
    match error:
        case Refusal():
            return error
        case StateNotFound():
            return Refusal(400, "state", str(error), param=error.param, retry=False)
        case BadRequest():
            return Refusal(400, "invalid", str(error), param=error.param, retry=False)
        case ContextFull():
            return Refusal(400, "context", str(error), param="messages", retry=False)
        case BadSampling():
            return Refusal(400, "invalid", str(error), param=error.param, retry=False)
        case EngineError():
            return Refusal(503, "engine", f"the engine failed: {error}")
        case BudgetSpent() if error.is_temporary:
            return Refusal(429, "quota", str(error))
        case BudgetSpent():
            return Refusal.out_of_quota(str(error))
        case StorageError():
            reason = "the gateway's disk is full or not writable; its log has the details"
            return Refusal(500, "internal", f"the request cannot be recorded: {reason}", retry=False)
        case ValueError():
            return Refusal(400, "invalid", str(error), retry=False)
        case _:
            return Refusal(500, "internal", "the gateway failed; its log has the details", retry=False)
