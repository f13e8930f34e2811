"""What can go wrong, as a tree. A failed trial is data and never an exception; these are for everything else.

    LoopwrightError
    ├── ScenarioError    (ValueError)       the scenario cannot be run as written; holds every problem found
    ├── MissingExtra     (ImportError)      an optional dependency is not installed; says what to install
    ├── StorageError     (OSError)          the disk is full, read-only or gone; nothing more can be recorded
    │   ├── LedgerError                     the ledger is damaged, too new, or not there
    │   └── OutputBusy                      another process works in this output directory
    ├── LaunchError      (RuntimeError)     a process could not be started
    ├── SandboxError     (OSError)          a sandbox that cannot be had on this machine   execution/sandbox/base.py
    ├── InvalidAction    (ValueError)       an action lies outside its space; becomes an `invalid` trial
    ├── PolicyError      (ValueError)       a policy cannot be loaded or applied           agents/rl/policy.py
    ├── ServerLost       (ConnectionError)  a live environment's server died or hangs      envs/live/server.py
    ├── ServerError      (ValueError)       a server answered something that it must not   envs/live/server.py
    ├── AddressError     (ValueError)       an address that cannot be used                 envs/live/address.py
    ├── WireError        (ValueError)       bytes that are not of the live protocol        envs/live/wire.py
    │   └── Unsendable                      what the live protocol has no words for        envs/live/wire.py
    ├── EngineError      (ConnectionError)  an engine failed or is gone                    engines/base.py
    │   ├── EngineAway                      nobody is there to be asked, for now           engines/base.py
    │   ├── EngineGone                      no server listens at its address               engines/http/client.py
    │   ├── ContextFull  (ValueError)       a conversation is longer than an engine takes  engines/base.py
    │   └── BadSampling  (ValueError)       what an engine has no true logprobs of         engines/base.py
    ├── BudgetSpent      (RuntimeError)     a rollout's turns or tokens are used up        gateway/sessions/session.py
    ├── BadRequest       (ValueError)       a request that its API does not allow          gateway/dialects/base.py
    ├── Refusal          (PermissionError)  a call that the gateway turns away             gateway/refusal.py
    ├── WorkerRefused    (PermissionError)  an engine that a relay will not have           gateway/relay/worker.py
    ├── TemplateError    (ValueError)       a tokenizer lacks a template's special tokens  gateway/sessions/template.py
    ├── AdvertiseError   (ValueError)       an address at which no agent could reach us    gateway/gateway.py
    ├── GatewayLost      (ConnectionError)  a gateway elsewhere that cannot be reached     gateway/client.py
    │   └── TrialServerLost                 a trial server is gone, or lost a trial  rollouts/trial_server/client.py
    ├── TasksError       (ValueError)       a source gives no tasks, or no proper ones     rollouts/tasks/sources.py
    │   └── TaskChanged                     a task's directory changed during a run        rollouts/tasks/harbor/task.py
    ├── JudgeFailed      (RuntimeError)     a judger gave no verdict, which is no zero     rollouts/judgers/base.py
    │   ├── JudgerDown                      too many failures in a row; it is left alone   rollouts/judgers/guard.py
    │   ├── BadVerdict   (ValueError)       a verdict that is not a number, or NaN  rollouts/judgers/verdict_parsing.py
    │   └── BadVerdictType (TypeError)      a verdict that is not even a number  rollouts/judgers/verdict_parsing.py
    ├── TooManyHangingCalls (RuntimeError)     too many calls of a function never returned    rollouts/threads.py
    ├── WorkerLost       (ConnectionError)  a worker died with a call in it, twice         rollouts/pools/base.py
    │   └── PoolDown                        no worker is left, and none can be made        rollouts/pools/base.py
    ├── ProductionFailed (RuntimeError)     group after group came to nothing              rollouts/producer.py
    ├── ResourcesError   (RuntimeError)     a cluster does not have what was asked for     rollouts/pools/resources.py
    ├── TrainingFailed   (RuntimeError)     training cannot go on, but can be resumed      trainers/failure.py
    ├── SeveralRows      (ValueError)       a rollout of which a trainer takes one branch  integrations/branch.py
    ├── NoReward         (RuntimeError)     a rollout that a trainer needs a reward of     integrations/branch.py
    └── SerializationError      (TypeError)        something that cannot be sent to a process     rollouts/pools/base.py

Each message says what happened, where, and the next move.
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
    """One thing that is wrong with a scenario: where it stands and what to do about it."""

    key: str
    message: str

    def __str__(self) -> str:
        return f"{self.key}: {self.message}" if self.key else self.message


class ScenarioError(LoopwrightError, ValueError):
    """A scenario that cannot be run as written. `problems` lists everything that was found, not only the first."""

    def __init__(self, file: Path | str, problems: Sequence[Problem]) -> None:
        self.file, self.problems = str(file), tuple(problems)
        super().__init__("\n".join(f"{self.file}, {problem}" for problem in self.problems))


class MissingExtra(LoopwrightError, ImportError):
    """An optional dependency is missing."""

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f"{what} needs an extra that is not installed. Run: pip install 'loopwright[{extra}]'")


class StorageError(LoopwrightError, OSError):
    """What was measured cannot be written down, so nothing more may be measured."""


class LedgerError(StorageError):
    """The ledger cannot be read or written."""


class OutputBusy(StorageError):
    """Another process holds the output directory."""


class LaunchError(LoopwrightError, RuntimeError):
    """A process could not be started; `infra` tells whether the machine, not the command, is to blame."""

    def __init__(self, message: str, *, infra: bool = False) -> None:
        super().__init__(message)
        self.infra = infra


class InvalidAction(LoopwrightError, ValueError):
    """An action that lies outside its space."""


_DISK = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up", errno.EROFS: "it is read-only"}


_GO_ON = "nothing that was recorded is lost: go on with `loopwright resume`"


@contextmanager
def storage(where: Path, *, then: str = _GO_ON) -> Iterator[None]:
    """Turn the operating system's refusals to write into a StorageError that names the place and the next move."""
    try:
        yield
    except LoopwrightError:
        raise
    except OSError as error:
        reason = _DISK.get(error.errno or 0) or error.strerror or str(error)
        advice = "Make room" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "Make it writable"
        raise StorageError(
            f"cannot write to {where}: {reason}. {advice}, or choose another --output; {then}."
        ) from error


def sentence(error: BaseException) -> str:
    """What an error says, so that another sentence can follow it."""
    said = str(error) or repr(error)
    return said if said.endswith((".", "?", "!")) else f"{said}."


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """The words that exist, and the one that was probably meant."""
    listed = f"Known: {', '.join(known)}." if known else "None is known."
    close = get_close_matches(word, known, n=1)
    return f"{listed} Did you mean {close[0]!r}?" if close else listed
