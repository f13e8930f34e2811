"""The public names: a change of this table is a change of what users import.

A package that is missing here is private. Documentation and examples import only from this table.
"""

import ast
import importlib
import pkgutil
from pathlib import Path

import pytest

import loopwright
from tests.docs.test_snippets import PAGES, snippets

PACKAGES = {
    "loopwright": """
        Agent AgentConfig AgentLoop BestResult Config ContinuousSpace Engine EngineConfig Env Episode Fault Feedback
        Gateway GymServer GymnasiumAdapter Job Judger JudgerConfig Ledger LoopConfig LoopwrightError NoResult
        ObsLeafDescriptor Observation Observer Outcome Payload PendingTrial Producer Result Reward RewardFunction
        Sampling ScenarioError SearchAgent Session Space StructuredObservation Study Task TasksConfig Trial TrialStopped
        Trials Workload WorkloadConfig dispatch engine_of integer load log make replay report rollout run tune uniform
    """,
    "loopwright.agents": """
        Agent AgentConfig BudgetedConfig SearchAgent SearchConfig SpaceAgent agents rollout_agents
    """,
    "loopwright.api": """
        AskTellError BestResult NoResult PendingTrial Report Study Trials
    """,
    "loopwright.cloudai": """
        Conversion convert
    """,
    "loopwright.core": """
        Agent AgentConfig Attempt Config Episode Fault Feedback InvalidAction LaunchError LedgerError LoopwrightError
        MissingExtra Node Observation Outcome OutputBusy Penalties Problem Proposal Registry Result Reward
        RewardFunction Row ScenarioError Span StorageError Task Trial rewards
    """,
    "loopwright.engines": """
        BadSampling ByteTokenizer Chunk ContextFull Engine EngineAway EngineConfig EngineError EngineGone Fleet
        FleetConfig HttpClient HttpConfig HttpEngine HubTokenizer LlamaCppConfig LlamaCppEngine RawChunk Sampling
        ScriptedConfig ScriptedEngine SglangConfig SglangEngine Tokenizer TransformersConfig TransformersEngine
        VllmConfig VllmEngine WeightUpdate engine_of engines
    """,
    "loopwright.envs": """
        AddressError EnvServer GymServer GymnasiumAdapter LiveAdapter LiveConfig LiveEnv ObsLeafDescriptor
        RegimeEncoder RemoteServer ReplayEnv SearchEnv ServerError ServerLost StructuredObservation VectorAdapter serve
    """,
    "loopwright.execution": """
        CallExecutor CallResult Command Completion Executor FunctionCall LocalExecutor LocalSystem OnStart SystemConfig
        Usage WorkerPool systems
    """,
    "loopwright.execution.sandbox": """
        Bounds NoSandbox Sandbox SandboxError SandboxInstance sandbox_of
    """,
    "loopwright.gateway": """
        AdvertiseError BudgetSpent ChatTemplate CompletedSession Exactness Gateway GatewayClient GatewayConfig
        GatewayLost OpenSession Refusal Relay RelayConfig RelayWorker RemoteSession Session SessionConfig
        SessionLimits TemplateError Turn TurnOptions Verdict WorkerRefused snapshot_of
    """,
    "loopwright.ledger": """
        Groups Ledger Observer Rejudgement Rollout RunStopped SharedCache Step TrialBook groups_of has_rollouts
    """,
    "loopwright.reports": """
        write_best write_csv write_parquet write_report
    """,
    "loopwright.rollouts": """
        AgentLoop BatchJudger BatchJudgerConfig Collect CollectConfig DatasetsTasks DiscardedGroups Episode
        EvalConfig FunctionJudger Group GroupJudger GroupProducer JsonlTasks JudgeFailed JudgeWorker
        Judger JudgerClient JudgerConfig JudgerDown LocalPool LoopConfig LoopWorker ParquetTasks Payload
        PolicySource ProduceConfig ProductionFailed Prompt PythonTasks RolloutConfig RolloutEnv RolloutRequest
        SingleTurn SingleTurnConfig Task TaskMix TasksConfig TasksError Verdict build_judger_client build_pool
        guard_judger rollout_env
    """,
    "loopwright.rollouts.judgers": """
        BaseJudger BatchJudger BatchJudgerConfig FunctionJudger GroupJudger GuardedJudger JudgeFailed JudgeWorker
        Judger JudgerClient JudgerConfig JudgerDown Payload Verdict build_judger guard_judger parse_judger
    """,
    "loopwright.rollouts.loops": """
        AgentLoop FunctionTool Loop LoopConfig LoopWorker RolloutRequest SingleTurn SingleTurnConfig ToolLoop
        ToolLoopConfig
    """,
    "loopwright.rollouts.pools": """
        LocalPool PlacementConfig Pool PoolDown RayPool ResourcesError StreamingWorker Worker WorkerLost
    """,
    "loopwright.rollouts.remote": """
        AgentSession EmbeddedGatewayHost ExternalGatewayHost GatewayAccess GatewayHost RemoteConfig
    """,
    "loopwright.rollouts.tasks": """
        DatasetsTasks JsonlTasks ParquetTasks Prompt PythonTasks TaskMix TasksConfig TasksError
    """,
    "loopwright.rollouts.trial_server": """
        Submission TrialServer TrialServerClient TrialServerConfig
    """,
    "loopwright.scenario": """
        LoadedScenario RunConfig Scenario
    """,
    "loopwright.selection": """
        Candidate ConfirmConfig Estimate Recommendation StoredTrial recommend stored_trials
    """,
    "loopwright.spaces": """
        Choice ContinuousSpace EnvParamConfig Fixed Parameter Range Space
    """,
    "loopwright.testing": """
        AgentContract EngineContract ExecutorContract FunctionWorkload GatewayContract IsolationContract
        JudgerContract LoopContract PoolContract SandboxContract WorkloadContract simulate
    """,
    "loopwright.trainers": """
        Algorithm GrpoConfig GrpoTrainer LoraConfig PolicyOutput PpoTrainConfig PpoTrainer RlooConfig RlooTrainer
        TokenBatch TrainConfig Trainer TrainingFailed
    """,
    "loopwright.workloads": """
        CommandConfig CommandWorkload Job MetricConfig PythonConfig PythonWorkload Site SuccessConfig Workload
        WorkloadConfig workloads
    """,
}
INTEGRATIONS = {
    "loopwright.integrations.harbor_env": "LocalEnvironment",
    "loopwright.integrations.trl": "TrlRollouts",
    "loopwright.integrations.verl": "RemoteAgentLoop VerlEngine VerlRollouts",
}
"""Modules that need the program they extend, so not every machine can import them."""

ROOT = Path(__file__).parents[1]
PUBLIC = {module: names.split() for module, names in (PACKAGES | INTEGRATIONS).items()}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_exports_exactly_the_public_names(package):
    exported = importlib.import_module(package).__all__
    assert exported == sorted(PUBLIC[package])


def test_every_package_with_exports_is_in_the_table():
    names = [
        "loopwright",
        *(module.name for module in pkgutil.walk_packages(loopwright.__path__, "loopwright.") if module.ispkg),
    ]
    assert {name for name in names if hasattr(importlib.import_module(name), "__all__")} == set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_can_be_imported(package):
    module = importlib.import_module(package)
    assert [name for name in PUBLIC[package] if not is_definition(getattr(module, name))] == []


def is_definition(item: object) -> bool:
    """Whether it is a class, a function or an object; a submodule of the same name would hide it."""
    return item is not None and not isinstance(item, type(ast))


@pytest.mark.parametrize("module", INTEGRATIONS)
def test_an_integration_defines_its_public_names(module):
    path = ROOT.joinpath("src", *module.split("."))
    files = sorted(path.glob("*.py")) or [path.with_suffix(".py")]
    trees = [ast.parse(file.read_text()) for file in files]
    classes = {node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}
    assert set(PUBLIC[module]) <= classes


def test_docs_and_examples_import_only_public_names():
    sources = {
        f"{page.name}:{snippet.line}": snippet.text
        for page in PAGES
        for snippet in snippets(page)
        if snippet.language == "python"
    }
    sources |= {
        str(path.relative_to(ROOT)): path.read_text()
        for path in (ROOT / "examples").rglob("*.py")
        if "tasks" not in path.parts  # some of these are broken on purpose, for an agent to repair
    }
    imports = {place: imported_names(text) for place, text in sources.items()}
    assert sum(map(len, imports.values())) > 20, "the documentation shows imports"
    assert [(place, name) for place, names in imports.items() for name in names if not is_public(*name)] == []


def imported_names(source: str) -> list[tuple[str, str | None]]:
    """Every module of Loopwright that the source imports, with the name it imports from there."""
    tree = ast.parse(source)
    modules = [(alias.name, None) for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names = [
        (node.module or "", alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    return [(module, name) for module, name in (*modules, *names) if module.partition(".")[0] == "loopwright"]


def is_public(module: str, name: str | None) -> bool:
    return module in PUBLIC and (name is None or name in PUBLIC[module])
