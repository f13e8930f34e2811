"""Contract suites and fakes that authors of plug-ins subclass."""

from loopwright.testing.agents import AgentContract
from loopwright.testing.executors import ExecutorContract
from loopwright.testing.workloads import FunctionWorkload, WorkloadContract

__all__ = ["AgentContract", "ExecutorContract", "FunctionWorkload", "WorkloadContract"]
