"""TRL trains on Loopwright's rollouts, on a CPU: four steps in a minute or two.

python examples/trl/train.py out/trl
loopwright audit out/trl
"""

import sys
from pathlib import Path

from trl import GRPOConfig, GRPOTrainer

from loopwright.integrations.trl import TrlRollouts


def main(output: str) -> None:
    with TrlRollouts(Path(__file__).parent / "study.toml", output=output) as rollouts:
        trainer = GRPOTrainer(
            model=rollouts.model_path,  # the engine's model; any model that TRL trains works, and `peft_config`
            args=GRPOConfig(
                output_dir=f"{output}/checkpoints",
                max_steps=4,
                save_steps=1,
                save_only_model=True,
                num_generations=4,
                per_device_train_batch_size=8,
                learning_rate=1e-5,
                temperature=1.0,
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                logging_steps=1,
                report_to=[],
            ),
            train_dataset=rollouts.dataset(),
            rollout_func=rollouts,
            reward_funcs=rollouts.judged,
        )
        trainer.train()


if __name__ == "__main__":
    main(sys.argv[1] if sys.argv[1:] else "out/trl")
