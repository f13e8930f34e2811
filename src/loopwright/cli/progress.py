"""Run a scenario with its progress shown or as JSON lines, and print the results."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loopwright.cli.options import emit, show
from loopwright.core.trial import Trial
from loopwright.ledger.ledger import Ledger
from loopwright.ledger.steps import Kind, Step
from loopwright.reports.formatting import counted, number, pairs
from loopwright.reports.kinds import kind_of
from loopwright.reports.live.digest import read_live
from loopwright.reports.live.policy import comparison
from loopwright.reports.objective import Objective
from loopwright.reports.progress import RunProgress, show_progress
from loopwright.reports.rollout.digest import read_rollouts, rollout_result
from loopwright.reports.search.digest import grouped_failures
from loopwright.reports.search.headline import describe, notes, title
from loopwright.reports.training.digest import read_training, training_result
from loopwright.scenario.dispatch import dispatch
from loopwright.scenario.kinds.base import LoadedScenario
from loopwright.selection.recommendation import Recommendation, recommend
from loopwright.selection.trials import stored_trials

_MAX_CANDIDATES = 10
_MAX_REASONS = 3


class JsonEvents(RunProgress):
    """One JSON object per trial, and per step of a training."""

    def show_step(self, kind: Kind, step: Step) -> None:
        training = self.training
        totals = {} if training is None else {"done": training.done, "total": training.total}
        facts = {"run": self.name, "kind": kind, "step": step.step, "numbers": dict(step.numbers)}
        emit({"event": "step", **facts, **totals})

    def show(self, trial: Trial) -> None:
        event = {
            "event": "trial",
            "run": self.name,
            "trial": trial.number,
            "outcome": trial.outcome,
            "fault": trial.fault,
            "reason": trial.reason,
            "reward": trial.reward.objectives if trial.reward else None,
            "action": trial.action,
            "env_params": trial.regime,
            "metrics": trial.metrics,
            "cached_from": trial.cached_from,
            "noise": trial.noise,
            "phase": trial.phase,
            "done": self.done,
            "total": self.total,
        }
        emit(event)


def run_with_progress(loaded: LoadedScenario, output: Path, *, quiet: bool, json: bool, **options: Any) -> int:
    """Run a scenario, show its progress, and print the results at the end."""
    display = RunProgress if quiet else JsonEvents if json else None
    answers: dict[str, Recommendation] = {}
    with show_progress(display, sys.stdout) as watch:
        code = dispatch(loaded, output, watch=watch, answers=answers, **options)
    for run in loaded.runs:
        path = output / run.name / "ledger.db"
        if path.exists():
            _print_result(run.name, path, answers.get(run.name), json=json)
    if json:
        emit({"event": "end", "code": code, "output": str(output)})
    else:
        show(f"report: {output / 'report.html'}")
        if code > 128:
            show(f"stopped; continue with: loopwright resume {output}")
    return code


def _print_result(name: str, path: Path, answer: Recommendation | None, *, json: bool) -> None:
    with Ledger.read(path) as ledger:
        kind = kind_of(ledger.state("run", {}))
        event, lines = _search_result(ledger, answer) if kind == "search" else _RESULTS[kind](ledger)
        if failure := ledger.state("failure"):
            event["failure"] = failure
            lines.append(f"failed: {failure.strip().splitlines()[-1]}")
    if json:
        emit({"event": "result", "run": name, **event})
    else:
        show(f"{name}: {lines[0]}")
        for line in lines[1:]:
            show(line, indent=2)


def _search_result(ledger: Ledger, answer: Recommendation | None) -> tuple[dict[str, Any], list[str]]:
    """The best actions of a search; `answer` is known if its report was made."""
    counts, about = ledger.counts(), ledger.state("run", {})
    best = answer or recommend(stored_trials(ledger), about)
    by_regime = about.get("conditions_on_regime")
    objectives = [Objective.of(label) for label in about["objectives"]]
    first = (*objectives, Objective("reward"))[0]
    candidates = best.by_regime if by_regime else best.front
    total = sum(counts.values()) - counts["cached"]
    stopped = f" and {counts['stopped']} stopped early" if counts.get("stopped") else ""
    lines = [f"{counts.get('ok', 0)} ok{stopped} of {counted(total, 'trial')}"]
    shown = [(title(candidate), candidate) for candidate in candidates[:_MAX_CANDIDATES]]
    if len(objectives) > 1 and not by_regime and best.baseline is not None and best.baseline not in best.front:
        shown.append(("the baseline", best.baseline))
    for name, candidate in shown:
        under = f"   under  {pairs(candidate.regimes[0])}" if by_regime else ""
        lines.append(f"{name}  {describe(candidate, objectives)}{under}")
    if len(candidates) > _MAX_CANDIDATES:
        lines.append(f"and {len(candidates) - _MAX_CANDIDATES} more, in best.toml")
    if not by_regime:
        lines += [
            f"best {choice.rule}  {first.text(choice.estimate.mean)} "
            f"({first.evidence(choice.estimate.interval, choice.estimate.count)})   with  {pairs(choice.action)}"
            for choice in best.robust
        ]
    lines += notes(best, first)
    event: dict[str, Any] = {
        "counts": counts,
        "best": [
            {
                "action": c.action,
                "regimes": c.regimes,
                "reward": c.objectives,
                "intervals": c.intervals,
                "trials": c.trials,
                "confirmed": c.confirmed,
            }
            for c in candidates
        ],
    }
    policy = comparison(ledger.state)
    if policy is not None:
        lines.append(f"policy, measured at the end: {policy.verdict(first)}")
        event["policy"] = policy.alone if policy.means is None else policy.means[0]
        if policy.means is not None:
            event["static"] = policy.means[1]
    if not counts.get("ok"):
        failed = ((t.number, str(t.outcome), "", t.reason) for t in ledger.trials() if t.reason)
        alike = [(group.outcome, reason) for group in grouped_failures(failed) for reason in group.reasons]
        for outcome, (reason, numbers) in sorted(alike, key=lambda each: -len(each[1][1]))[:_MAX_REASONS]:
            lines.append(f"{len(numbers)} × {outcome}: {reason}")
    return event, lines


def _live_result(ledger: Ledger) -> tuple[dict[str, Any], list[str]]:
    """The returns of a live run."""
    digest = read_live(ledger)
    episodes = digest.episodes
    count, mean = episodes.total.count + episodes.failed, episodes.after if episodes.total.count else None
    failed = f", {number(digest.failed)} failed" if digest.failed else ""
    lines = [f"{counted(digest.steps, 'step')} in {counted(count, 'episode')}{failed}"]
    if mean is not None and episodes.total.count == 1:
        lines.append(f"return of the only complete episode: {mean:.6g}")
    elif mean is not None:
        window = episodes.window
        what = f"mean return of the last {window} episodes" if window > 1 else "return of the last episode"
        if episodes.seed_trials:
            what += ", in training with the last seed"
        lines.append(f"{what}: {mean:.6g} (of the first{f' {window}' if window > 1 else ''}: {episodes.before:.6g})")
        if episodes.change is None or not episodes.change.sign:
            lines.append("no clear change")
    if digest.evaluations.results:
        lines.append(f"evaluation: {digest.evaluations.verdict()}")
    for failure in digest.failures()[:_MAX_REASONS]:
        lines += [f"{len(numbers)} × {failure.outcome}: {reason}" for reason, numbers in failure.reasons[:1]]
    return {"counts": ledger.counts(), "episodes": count, "mean_return": mean}, lines


_RESULTS: dict[str, Callable[[Ledger], tuple[dict[str, Any], list[str]]]] = {
    "live": _live_result,
    "rollout": lambda ledger: rollout_result(read_rollouts(ledger)),
    "training": lambda ledger: training_result(read_training(ledger)),
}
"""The result of each other kind of run, for scripts and for people."""
