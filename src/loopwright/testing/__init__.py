"""Contract suites and fakes that authors of plug-ins subclass."""

import pytest

# Before they are imported: a suite's failures then show both sides of a comparison, as those of any test file do.
pytest.register_assert_rewrite(
    *(
        f"{__name__}.{suite}"
        for suite in (
            "agents",
            "engines",
            "executors",
            "gateways",
            "judgers",
            "loops",
            "pools",
            "sandboxes",
            "workloads",
        )
    )
)

from loopwright.testing.agents import AgentContract  # noqa: E402
from loopwright.testing.clock import simulate  # noqa: E402
from loopwright.testing.engines import EngineContract  # noqa: E402
from loopwright.testing.executors import ExecutorContract  # noqa: E402
from loopwright.testing.gateways import GatewayContract  # noqa: E402
from loopwright.testing.judgers import JudgerContract  # noqa: E402
from loopwright.testing.loops import LoopContract  # noqa: E402
from loopwright.testing.pools import PoolContract  # noqa: E402
from loopwright.testing.sandboxes import SandboxContract, WallsContract  # noqa: E402
from loopwright.testing.workloads import FunctionWorkload, WorkloadContract  # noqa: E402

__all__ = [
    "AgentContract",
    "EngineContract",
    "ExecutorContract",
    "FunctionWorkload",
    "GatewayContract",
    "JudgerContract",
    "LoopContract",
    "PoolContract",
    "SandboxContract",
    "WallsContract",
    "WorkloadContract",
    "simulate",
]
