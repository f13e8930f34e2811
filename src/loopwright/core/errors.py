"""The exceptions, as a tree. A failed trial is data and never an exception; these are for everything else.

    LoopwrightError
    ├── ScenarioError    (ValueError)       the scenario cannot be run as written; lists every problem
    ├── MissingExtra     (ImportError)      an optional dependency is not installed; names the pip command
    ├── StorageError     (OSError)          the disk is full, read-only or gone; nothing more can be recorded
    │   ├── LedgerError                     the ledger is damaged, too new, or missing
    │   └── OutputBusy                      another process uses this output directory
    ├── LaunchError      (RuntimeError)     a process could not be started
    ├── SandboxError     (OSError)          a sandbox is not available on this machine     execution/sandbox/base.py
    ├── InvalidAction    (ValueError)       an action is outside its space; becomes an `invalid` trial
    ├── AskTellError     (ValueError)       a trial that is not pending, or not open        api/ask_tell.py
    ├── NoResult         (LookupError)      a study has no result yet                      api/study.py
    ├── PolicyError      (ValueError)       a policy cannot be loaded or applied           agents/rl/policy.py
    ├── ServerLost       (ConnectionError)  a live environment's server died or hangs      envs/live/server.py
    ├── ServerError      (ValueError)       a live server sent an invalid response         envs/live/server.py
    ├── AddressError     (ValueError)       an address that cannot be used                 envs/live/address.py
    ├── WireError        (ValueError)       a message that breaks the live protocol        envs/live/wire.py
    │   └── Unsendable                      a value that the live protocol cannot encode   envs/live/wire.py
    ├── EngineError      (ConnectionError)  an engine failed or is gone                    engines/base.py
    │   ├── EngineAway                      an engine is unavailable for now               engines/base.py
    │   ├── EngineGone                      no server listens at its address               engines/http/client.py
    │   ├── ContextFull  (ValueError)       a conversation exceeds the engine's context    engines/base.py
    │   └── BadSampling  (ValueError)       sampling without exact logprobs                engines/base.py
    ├── BudgetSpent      (RuntimeError)     a rollout's turns or tokens are used up        gateway/sessions/session.py
    ├── BadRequest       (ValueError)       a request that its API does not allow          gateway/dialects/base.py
    ├── Refusal          (PermissionError)  the gateway refuses a call                     gateway/refusal.py
    ├── WorkerRefused    (PermissionError)  a relay refuses an engine                      gateway/relay/worker.py
    ├── TemplateError    (ValueError)       a tokenizer lacks a template's special tokens  gateway/sessions/template.py
    ├── AdvertiseError   (ValueError)       no agent could reach us at this address        gateway/gateway.py
    ├── GatewayLost      (ConnectionError)  an external gateway cannot be reached          gateway/client.py
    │   └── TrialServerLost                 a trial server is gone, or lost a trial  rollouts/trial_server/client.py
    ├── TasksError       (ValueError)       a source has no tasks, or invalid ones         rollouts/tasks/sources.py
    │   └── TaskChanged                     a task's directory changed during a run        rollouts/tasks/harbor/task.py
    ├── JudgeFailed      (RuntimeError)     a judger gave no verdict, which is not zero    rollouts/judgers/base.py
    │   ├── JudgerDown                      too many failures in a row; judging is paused  rollouts/judgers/guard.py
    │   ├── BadVerdict   (ValueError)       a verdict that is NaN or infinite       rollouts/judgers/verdict_parsing.py
    │   └── BadVerdictType (TypeError)      a verdict that is not a number          rollouts/judgers/verdict_parsing.py
    ├── TooManyHangingCalls (RuntimeError)  too many calls of a function never returned    rollouts/threads.py
    ├── WorkerLost       (ConnectionError)  a worker died twice during the same call       rollouts/pools/base.py
    │   └── PoolDown                        all workers are gone, and none can be started  rollouts/pools/base.py
    ├── ProductionFailed (RuntimeError)     too many groups failed in a row                rollouts/producer.py
    ├── ResourcesError   (RuntimeError)     a cluster lacks the requested resources        rollouts/pools/resources.py
    ├── TrainingFailed   (RuntimeError)     training stopped, but can be resumed           trainers/failure.py
    ├── SeveralRows      (ValueError)       a trainer takes one branch of each rollout     integrations/branch.py
    ├── NoReward         (RuntimeError)     a trainer needs a reward for this rollout      integrations/branch.py
    └── SerializationError (TypeError)      a value that cannot be sent to a process       rollouts/pools/base.py

Each message says what happened, where, and the fix.
"""

import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path


class LoopwrightError(Exception):
    """The base of all errors that Loopwright raises on purpose."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a scenario: its place and the fix."""

    key: str
    message: str

    def __str__(self) -> str:
        return f"{self.key}: {self.message}" if self.key else self.message


class ScenarioError(LoopwrightError, ValueError):
    """A scenario that cannot be run as written. `problems` lists all problems, not only the first."""

    def __init__(self, file: Path | str, problems: Sequence[Problem]) -> None:
        self.file, self.problems = str(file), tuple(problems)
        super().__init__("\n".join(f"{self.file}, {problem}" for problem in self.problems))


class MissingExtra(LoopwrightError, ImportError):
    """An optional dependency is missing."""

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f"{what} needs an extra that is not installed. Run: pip install 'loopwright[{extra}]'")


class StorageError(LoopwrightError, OSError):
    """A result cannot be written, so no further trial may run."""


class LedgerError(StorageError):
    """The ledger cannot be read or written."""


class OutputBusy(StorageError):
    """Another process holds the output directory."""


class LaunchError(LoopwrightError, RuntimeError):
    """A process could not be started; `infra` is true if the machine, not the command, is at fault."""

    def __init__(self, message: str, *, infra: bool = False) -> None:
        super().__init__(message)
        self.infra = infra


class InvalidAction(LoopwrightError, ValueError):
    """An action that lies outside its space."""


_DISK = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up", errno.EROFS: "it is read-only"}


_CONTINUE = "nothing that was recorded is lost: continue with `loopwright resume`"


@contextmanager
def storage(where: Path, *, then: str = _CONTINUE) -> Iterator[None]:
    """Raise the operating system's write errors as a StorageError that names the path and the fix."""
    try:
        yield
    except LoopwrightError:
        raise
    except OSError as error:
        reason = _DISK.get(error.errno or 0) or error.strerror or str(error)
        advice = "Free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "Make it writable"
        raise StorageError(
            f"cannot write to {where}: {reason}. {advice}, or choose another --output; {then}."
        ) from error


def sentence(error: BaseException) -> str:
    """An error's message, ending with a full stop, so that another sentence can follow."""
    message = str(error) or repr(error)
    return message if message.endswith((".", "?", "!")) else f"{message}."


def did_you_mean(word: str, names: Sequence[str]) -> str:
    """The names that exist, and the one that was probably meant."""
    listing = f"Known: {', '.join(names)}." if names else "None is known."
    close = get_close_matches(word, names, n=1)
    return f"{listing} Did you mean {close[0]!r}?" if close else listing
