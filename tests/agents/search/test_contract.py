"""Every shipped agent keeps the contract that a plug-in's agent must keep."""

from typing import ClassVar

from loopwright.testing import AgentContract


class TestGrid(AgentContract):
    agent_type = "grid"


class TestRandom(AgentContract):
    agent_type = "random"


class TestTpe(AgentContract):
    agent_type = "tpe"
    options: ClassVar = {"startup": 4}


class TestGp(AgentContract):
    agent_type = "gp"
    options: ClassVar = {"startup": 11}


class TestCmaes(AgentContract):
    agent_type = "cmaes"
    options: ClassVar = {"startup": 2}


class TestNsga2(AgentContract):
    agent_type = "nsga2"
    options: ClassVar = {"population": 3}


class TestBandit(AgentContract):
    agent_type = "bandit"
    options: ClassVar = {"arms": 27}
