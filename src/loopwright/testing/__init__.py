"""Contract suites and fakes for plug-in authors."""

from pkgutil import iter_modules

import pytest

# Before their import, so that failed assertions show both sides of a comparison, as in any test file.
pytest.register_assert_rewrite(*(f"{__name__}.{suite.name}" for suite in iter_modules(__path__)))

from loopwright.testing.agents import AgentContract  # noqa: E402
from loopwright.testing.clock import simulate  # noqa: E402
from loopwright.testing.engines import EngineContract  # noqa: E402
from loopwright.testing.executors import ExecutorContract  # noqa: E402
from loopwright.testing.gateways import GatewayContract  # noqa: E402
from loopwright.testing.isolation import IsolationContract  # noqa: E402
from loopwright.testing.judgers import JudgerContract  # noqa: E402
from loopwright.testing.loops import LoopContract  # noqa: E402
from loopwright.testing.pools import PoolContract  # noqa: E402
from loopwright.testing.sandboxes import SandboxContract  # noqa: E402
from loopwright.testing.workloads import FunctionWorkload, WorkloadContract  # noqa: E402

__all__ = [
    "AgentContract",
    "EngineContract",
    "ExecutorContract",
    "FunctionWorkload",
    "GatewayContract",
    "IsolationContract",
    "JudgerContract",
    "LoopContract",
    "PoolContract",
    "SandboxContract",
    "WorkloadContract",
    "simulate",
]
