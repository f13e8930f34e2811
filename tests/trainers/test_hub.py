"""A hub model from the hub client's cache: the trained policy is saved with its tokenizer."""

import os
import subprocess
import sys
from pathlib import Path

TEMPLATE = "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}"
TRAINED = """
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from loopwright.engines.inprocess.models import causal_model
from loopwright.engines.named_tokenizer import tokenizer_of
from loopwright.trainers.grpo import GrpoConfig, GrpoAlgorithm
from loopwright.trainers.learner import LearnerSettings
from loopwright.trainers.learners import LocalLearner

cache, out = map(Path, sys.argv[1:])
place = cache / "hub" / "models--some--model"
(place / "refs").mkdir(parents=True)
(place / "refs" / "main").write_text("abc")
snapshot = place / "snapshots" / "abc"
causal_model("tiny", out).save_pretrained(snapshot)
letters = sorted(pre_tokenizers.ByteLevel.alphabet())
made = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
kept = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>")
kept.chat_template = sys.stdin.read()
kept.save_pretrained(snapshot)

learner = LocalLearner(LearnerSettings(GrpoConfig(steps=1), GrpoAlgorithm, "some/model", out), out, in_process=False)
for write in (learner.save, learner.write):
    directory = out / write.__name__
    directory.mkdir()
    write(directory)
    causal_model(str(directory), out)
    ids = tokenizer_of(str(directory), out).encode("what is said")
    assert ids == tokenizer_of("some/model", out).encode("what is said") != []
"""


def test_a_policy_from_the_hub_is_saved_with_its_tokenizer(tmp_path):
    (tmp_path / "out").mkdir()
    command = [sys.executable, "-c", TRAINED, str(tmp_path / "cache"), str(tmp_path / "out")]
    env = {**os.environ, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(
        command, env=env, input=TEMPLATE, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=100
    )
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "out" / "save" / "chat_template.jinja").read_text() == TEMPLATE
