"""The exceptions of Loopwright, as a tree. A failed trial is data and never an exception; these are for the rest.

    LoopwrightError
    ├── ScenarioError (ValueError)       the scenario cannot run as written; lists every problem
    ├── MissingExtra (ImportError)       an optional dependency is not installed
    ├── StorageError (OSError)           the disk is full, read-only or gone
    │   ├── LedgerError                  the ledger is damaged, too new or missing
    │   └── OutputBusy                   another process uses this output directory
    ├── LaunchError (RuntimeError)       a process could not be started
    ├── ClusterError (RuntimeError)      a cluster takes no job, or cannot run any
    │   └── ResourcesError               the cluster lacks the resources          rollouts/pools/resources.py
    ├── SandboxError (OSError)           this machine cannot provide the sandbox  execution/sandbox/base.py
    ├── InvalidAction (ValueError)       the action is outside its space; an `invalid` trial
    ├── NoResult (LookupError)           a study has no successful trial          api/study.py
    ├── AskTellError (ValueError)        a trial was told that is not pending     api/ask_tell.py
    ├── RaceError                        an agent cannot take part in a race      agents/search/race.py
    ├── PolicyError (ValueError)         a policy cannot be loaded or applied     agents/rl/policy.py
    ├── ServerLost (ConnectionError)     a live server died or hangs              envs/live/server.py
    ├── ServerError (ValueError)         a server sent an invalid response        envs/live/server.py
    │   └── NoGoodStep                   every step of an environment fails       envs/live/episode_log.py
    ├── AddressError (ValueError)        an address cannot be used                envs/live/address.py
    ├── WireError (ValueError)           the bytes violate the live protocol      envs/live/wire.py
    │   └── Unsendable                   the protocol cannot express a value      envs/live/wire.py
    ├── RenderError (ValueError)         a chat template refused a conversation   engines/chat_template.py
    ├── EngineError (ConnectionError)    an engine failed                         engines/base.py
    │   ├── EngineAway                   no engine is available right now         engines/base.py
    │   ├── EngineGone                   no server listens at its address         engines/http/client.py
    │   ├── ContextFull (ValueError)     the conversation exceeds the context     engines/base.py
    │   └── BadSampling (ValueError)     the engine cannot give true logprobs     engines/base.py
    ├── BudgetSpent (RuntimeError)       a rollout used all its turns or tokens   gateway/sessions/session.py
    ├── BadRequest (ValueError)          a request violates its API               gateway/dialects/fields.py
    │   └── StateNotFound                a request refers to what is not stored   gateway/dialects/fields.py
    ├── Refusal (PermissionError)        the gateway rejects a call               gateway/refusal.py
    ├── WorkerRefused (PermissionError)  a relay rejects an engine                gateway/relay/worker.py
    ├── TemplateError (ValueError)       the tokenizer lacks special tokens       gateway/sessions/template.py
    ├── AdvertiseError (ValueError)      no agent could reach the address         gateway/gateway.py
    ├── GatewayLost (ConnectionError)    a remote gateway cannot be reached       gateway/client.py
    │   └── TrialServerLost              a trial server is gone, or lost a trial  rollouts/trial_server/client.py
    ├── TasksError (ValueError)          a source has no tasks, or invalid ones   rollouts/tasks/sources.py
    │   ├── TaskChanged                  a task's directory changed during a run  rollouts/tasks/harbor/task.py
    │   └── ImageRequired                a task needs its own container image     rollouts/tasks/harbor/task.py
    ├── ImageError (ValueError)          an image cannot be pulled or built   execution/sandbox/docker_images.py
    ├── JudgeFailed (RuntimeError)       a judger gave no verdict; not a zero     rollouts/judgers/base.py
    │   ├── JudgerDown                   too many failures in a row               rollouts/judgers/guard.py
    │   ├── BadVerdict (ValueError)      a verdict is not a finite number  rollouts/judgers/verdict_parsing.py
    │   └── BadVerdictType (TypeError)   a verdict has the wrong type  rollouts/judgers/verdict_parsing.py
    ├── TooManyHangingCalls (RuntimeError) too many calls never returned            rollouts/threads.py
    ├── WorkerLost (ConnectionError)     a worker died with a call in it, twice   rollouts/pools/base.py
    │   └── PoolDown                     no worker is left or can be started      rollouts/pools/base.py
    ├── EventLoopBlocked (TimeoutError)  a call blocked until it was interrupted  rollouts/pools/base.py
    ├── RolloutFailed (RuntimeError)     an agent's function failed, and knows why rollouts/remote/agent.py
    ├── ProductionFailed (RuntimeError)  no group could be produced               rollouts/producer.py
    ├── TrainingFailed (RuntimeError)    training stopped; it can be resumed      trainers/failure.py
    ├── NotConvertible                   a policy cannot be written as GGUF       trainers/export/gguf.py
    ├── SeveralRows (ValueError)         a trainer accepts one branch per rollout integrations/branch.py
    ├── NoReward (RuntimeError)          a trainer needs a reward for a rollout   integrations/branch.py
    └── SerializationError (TypeError)   a value cannot be sent to a process      rollouts/pools/base.py

Each message says what happened, where, and the next move.
"""

import errno
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Codes that a terminal obeys, including those that change the direction of writing."""


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
        super().__init__("\n".join(f"{self.file}: {problem}" for problem in self.problems))


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
    """A process could not be started, or was lost with its machine.

    `infra` is true if the machine, not the command, is at fault; `cancelled` if somebody else ended its job.
    """

    def __init__(self, message: str, *, infra: bool = False, cancelled: bool = False) -> None:
        super().__init__(message)
        self.infra, self.cancelled = infra, cancelled


class ClusterError(LoopwrightError, RuntimeError):
    """A cluster takes no job at all, or its nodes cannot run any; no further trial may start."""


class InvalidAction(LoopwrightError, ValueError):
    """An action that lies outside its space."""


_DISK = {
    errno.ENOSPC: ("the disk is full", "Free some space"),
    errno.EDQUOT: ("the disk quota is used up", "Free some space"),
    errno.EROFS: ("it is read-only", "Make it writable"),
    errno.EEXIST: ("a file of this name exists", "Move the file"),
    errno.ENOTDIR: ("part of the path is a file", "Move the file"),
}
"""What the common errors mean, and the fix."""
_CONTINUE = "nothing that was recorded is lost: continue with `loopwright resume`"


@contextmanager
def storage(where: Path, *, then: str = _CONTINUE) -> Iterator[None]:
    """Raise the operating system's write errors as a StorageError that names the path and the fix."""
    try:
        yield
    except LoopwrightError:
        raise
    except OSError as error:
        unknown = (error.strerror or str(error), "Make it writable")
        reason, advice = _DISK.get(error.errno or 0, unknown)
        raise StorageError(
            f"cannot write to {where}: {reason}. {advice}, or choose another --output; {then}."
        ) from error


_MOST_NAMES = 50
"""How many names an error lists; a run may have thousands of tasks."""


def sentence(error: BaseException) -> str:
    """An error's message, ending with a full stop, so that another sentence can follow."""
    message = str(error) or repr(error)
    return message if message.endswith((".", "?", "!")) else f"{message}."


def printable(text: str) -> str:
    """Text with its control characters shown: what a model or a program wrote may hold codes that a terminal obeys."""
    return _CONTROL.sub(lambda match: repr(match[0])[1:-1], text)


def did_you_mean(word: str, names: Sequence[str]) -> str:
    """The names that exist, and the one that was probably meant."""
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    listing = f"Known: {', '.join(names[:_MOST_NAMES])}{more}." if names else "None is known."
    close = get_close_matches(word, names, n=1)
    return f"{listing} Did you mean {close[0]!r}?" if close else listing
