"""Rollouts for a trainer of your own: run it again with the same directory, and it continues.

python examples/own_trainer.py out/own
"""

import asyncio
import sys
from pathlib import Path
from statistics import fmean

import loopwright

SCENARIO = Path(__file__).parent / "rollouts" / "arith.toml"


def train(groups):
    """Your step: each rollout's token ids, masks and logprobs, and its advantage over its group."""
    samples = []
    for group in groups:
        judged = [episode for episode in group.episodes.values() if episode.reward is not None]
        mean = fmean(episode.reward.value for episode in judged)
        samples += [(row, episode.reward.value - mean) for episode in judged for row in episode.rows()]
    print(f"{len(groups)} groups, {sum(len(row.response_ids) for row, _ in samples)} tokens")
    return  # your new weights, as the engine takes them: tensors by name, or the path of a checkpoint


async def main(output):
    checkpoint = Path(output) / "checkpoint"  # yours has the weights, too
    async with loopwright.Producer(SCENARIO, output=output) as producer:
        if checkpoint.exists():  # an earlier process trained: publish its weights first
            await producer.publish(None, int(checkpoint.read_text()))
        while groups := await producer.batch(8):
            weights, version = train(groups), producer.version + 1
            await producer.publish(weights, version)
            checkpoint.write_text(str(version))
            producer.trained(groups)  # after your checkpoint


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if sys.argv[1:] else "out/own-trainer"))
