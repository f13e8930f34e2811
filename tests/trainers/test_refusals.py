"""Untrainable models and foreign checkpoints are refused with a message, without a traceback."""

import pytest

from loopwright.engines.inprocess.models import causal_model
from loopwright.trainers.failure import TrainingFailed
from loopwright.trainers.model import _check
from tests.trainers.factories import learner_of

ADAPTERS = {"r": 4, "targets": ["q_proj"]}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("grpo", {"lora": {**ADAPTERS, "r": 8}}),
        ("grpo", {"lora": {**ADAPTERS, "targets": ["o_proj"]}}),
        ("grpo", {}),
        ("ppo", {"lora": ADAPTERS}),
    ],
    ids=["rank", "targets", "no adapters", "critic"],
)
def test_a_foreign_checkpoint_is_refused(tmp_path, kind, options):
    learner_of("grpo", tmp_path, lora=ADAPTERS).write(tmp_path)
    with pytest.raises(TrainingFailed, match="is a checkpoint of another model"):
        learner_of(kind, tmp_path, **options).read(tmp_path)


def test_a_model_that_changes_its_logits_after_the_last_matrix_is_refused(tmp_path):
    model = causal_model("tiny", tmp_path)
    forward = model.forward

    def louder(**kwargs):
        output = forward(**kwargs)
        output.logits = output.logits * 2
        return output

    model.forward = louder
    with pytest.raises(TrainingFailed, match="model 'odd' changes its logits"):
        _check(model, "odd")
