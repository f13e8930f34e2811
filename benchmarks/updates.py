"""One side of the training benchmark, in a separate process: `python -m benchmarks.updates ours|trl-16|trl-4`.

The same model, the same sequences: 16 answers of 20 to 170 tokens to two prompts. TRL goes through so many rows at a
time, each as long as the longest of all, which is how it cuts up what it generated; ours through as many tokens at a
time as four of those rows have.
Prints the best seconds of a step, the peak memory in bytes, and the gradient's norm in the first step.
"""

import json
import resource
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from loopwright.engines.inprocess import smollm2

ROUNDS = 2
PROMPTS, ANSWERS, PROMPT_TOKENS, LONGEST = 2, 8, 64, 170


def sequences() -> list[tuple[list[int], list[int], float]]:
    """(prompt, answer, advantage)."""
    random = np.random.default_rng(0)
    sequences = []
    for _ in range(PROMPTS):
        prompt = random.integers(100, 40_000, PROMPT_TOKENS).tolist()
        lengths = random.integers(20, LONGEST, ANSWERS)
        sequences += [(prompt, random.integers(100, 40_000, n).tolist(), float(random.normal())) for n in lengths]
    return sequences


def ours(home: Path) -> Callable[[], float]:
    from loopwright.trainers.grpo import GrpoAlgorithm, GrpoConfig
    from loopwright.trainers.learner import Learner, LearnerSettings
    from loopwright.trainers.sample import Sample

    # Theirs has no recorded logprobs here, and corrects nothing by them.
    config = GrpoConfig(steps=100, lr=1e-6, importance=0.0, micro_tokens=4 * (PROMPT_TOKENS + LONGEST))
    learner = Learner(LearnerSettings(config, GrpoAlgorithm, "smollm2", home))
    batch = []
    for number, (prompt, answer, advantage) in enumerate(sequences()):
        ids = np.array([*prompt, *answer], dtype=np.int64)
        mask = np.arange(len(ids)) >= len(prompt)
        recorded = np.full(len(ids), -11.0, dtype=np.float32)
        batch.append(Sample(ids, mask, recorded, advantage, 0.0, 1.0 / len(answer), number))
    return lambda: learner.update(batch, 1)["grad_norm"]


def trl(home: Path, rows_at_once: int) -> Callable[[], float]:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    peer: Any = import_module("trl")
    place = smollm2.directory()
    model: Any = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    count = PROMPTS * ANSWERS
    pieces = count // rows_at_once
    config = peer.GRPOConfig(
        output_dir=str(home),
        per_device_train_batch_size=rows_at_once,
        gradient_accumulation_steps=pieces,
        num_generations=ANSWERS,
        learning_rate=1e-6,
        loss_type="grpo",
        beta=0.0,
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
    )
    trainer = peer.GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["?"] * count}),
        processing_class=AutoTokenizer.from_pretrained(place),
    )
    rows = sequences()
    longest = max(len(answer) for _, answer, _ in rows)
    inputs = {
        "prompt_ids": torch.tensor([prompt for prompt, _, _ in rows]),
        "prompt_mask": torch.ones(count, PROMPT_TOKENS, dtype=torch.long),
        "completion_ids": torch.tensor([answer + [0] * (longest - len(answer)) for _, answer, _ in rows]),
        "completion_mask": torch.tensor([[1] * len(a) + [0] * (longest - len(a)) for _, a, _ in rows]),
        "advantages": torch.tensor([advantage for _, _, advantage in rows]),
        "num_items_in_batch": torch.tensor(sum(len(answer) for _, answer, _ in rows)),
    }
    starts = range(0, count, rows_at_once)
    parts = [
        {name: value[start : start + rows_at_once] if value.dim() else value for name, value in inputs.items()}
        for start in starts
    ]
    trainer._prepare_inputs = lambda part: part
    trainer.current_gradient_accumulation_steps = pieces
    trainer.create_optimizer()
    trainer.model.train()

    def step() -> float:
        trainer.optimizer.zero_grad()
        for part in parts:
            trainer.training_step(trainer.model, part, part["num_items_in_batch"])
        norm = torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
        trainer.optimizer.step()
        return float(norm)

    return step


def main() -> None:
    with TemporaryDirectory() as home:
        side, _, rows_at_once = sys.argv[1].partition("-")
        step = trl(Path(home), int(rows_at_once)) if side == "trl" else ours(Path(home))
        norm = step()
        times_s = []
        for _ in range(ROUNDS):
            start_s = time.perf_counter()
            step()
            times_s.append(time.perf_counter() - start_s)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"seconds": min(times_s), "peak_bytes": peak, "norm": norm}))


if __name__ == "__main__":
    main()
