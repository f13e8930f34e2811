"""Refusals: what the gateway will not do for whoever asks, as an HTTP status and one of our kinds."""

from loopwright.core.errors import LoopwrightError, StorageError
from loopwright.engines.base import BadSampling, ContextFull, EngineError
from loopwright.gateway.dialects.base import BadRequest
from loopwright.gateway.sessions.session import BudgetSpent


class Refusal(LoopwrightError, PermissionError):
    """A request that is refused. `retry` is False where an SDK would try again in vain."""

    def __init__(self, status: int, kind: str, message: str, *, param: str | None = None, retry: bool = True) -> None:
        super().__init__(message)
        self.status, self.kind, self.param, self.retry = status, kind, param, retry

    @classmethod
    def unknown(cls, id: str) -> "Refusal":
        """No session of this name."""
        return cls(404, "not_found", f"there is no session {id[:80]!r}; open one with POST /sessions", retry=False)

    @classmethod
    def key(cls) -> "Refusal":
        """No key, or not this session's."""
        return cls(401, "authentication", "the API key is not the one of this session", retry=False)

    @classmethod
    def closed(cls, id: str, status: str) -> "Refusal":
        """A session that takes no more calls. SDKs retry a 409 unless told not to."""
        return cls(409, "closed", f"session {id!r} is {status}; it takes no more calls", retry=False)

    @classmethod
    def spent(cls, what: str) -> "Refusal":
        """A quota that does not fill up again."""
        return cls(429, "quota", f"this session may do no more: {what}", retry=False)


def refusal_of(error: Exception) -> Refusal:
    """What an agent is told of an error; one that we did not foresee is not shown."""
    match error:
        case Refusal():
            return error
        case BadRequest():
            return Refusal(400, "invalid", str(error), param=error.param, retry=False)
        case ContextFull():
            return Refusal(400, "context", str(error), param="messages", retry=False)
        case BadSampling():
            return Refusal(400, "invalid", str(error), retry=False)
        case EngineError():
            return Refusal(503, "engine", f"the engine failed: {error}")
        case BudgetSpent() if error.held:
            return Refusal(429, "quota", str(error))
        case BudgetSpent():
            return Refusal.spent(str(error))
        case StorageError():
            return Refusal(500, "internal", f"the turn cannot be recorded: {error}", retry=False)
        case ValueError():
            return Refusal(400, "invalid", str(error), retry=False)
        case _:
            return Refusal(500, "internal", "the gateway failed; its log says why", retry=False)
