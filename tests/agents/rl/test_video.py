"""Videos of evaluation episodes: recorded where `render_mode` asks for them, small, and shown in the report."""

import base64
import struct
import zlib

import numpy as np
import pytest
from tests.agents.rl.scenarios import live_scenario, load_error, state, train

from loopwright.agents.rl.video import MAX_BYTES, VideoRecorder, animated_png
from loopwright.core.errors import ScenarioError
from loopwright.scenario.load import load

DRAWN = """
import gymnasium
import numpy as np

class Drawn(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-10, 10, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}

    def __init__(self, render_mode=None, broken=False):
        self.render_mode, self.broken = render_mode, broken

    def reset(self, *, seed=None, options=None):
        self.left = 8
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.left -= 1
        return np.zeros(1, np.float32), float(action), self.left == 0, False, {}

    def render(self):
        assert self.render_mode == "rgb_array" and not self.broken, "cannot draw"
        image = np.full((300, 500, 3), 255, np.uint8)
        image[100:200, 50 * self.left : 50 * self.left + 40] = (200, 40, 40)
        return image
"""
AGENT = 'type = "ppo", trials = 128, rollout = 64, evaluate = { every = 64, episodes = 2 }'


def frames(data):
    """The frames of an animated PNG, decoded by its specification."""
    place, images, size = 8, [], None
    while place < len(data):
        (length,), kind = struct.unpack(">I", data[place : place + 4]), data[place + 4 : place + 8]
        body = data[place + 8 : place + 8 + length]
        assert struct.unpack(">I", data[place + 8 + length : place + 12 + length])[0] == zlib.crc32(kind + body)
        if kind == b"IHDR":
            size = struct.unpack(">II", body[:8])
        elif kind in (b"IDAT", b"fdAT"):
            raw = zlib.decompress(body if kind == b"IDAT" else body[4:])
            rows = np.frombuffer(raw, np.uint8).reshape(size[1], 1 + 3 * size[0])
            assert (rows[:, 0] == 2).all()
            images.append(rows[:, 1:].cumsum(axis=0, dtype=np.uint8).reshape(size[1], size[0], 3))
        place += 12 + length
    return images


def test_an_animation_has_every_frame_unchanged():
    images = [np.random.default_rng(n).integers(0, 256, (5, 7, 3), np.uint8) for n in range(4)]
    for ours, theirs in zip(frames(animated_png(images, 0.1)), images, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_video_is_small_however_long_the_episode_and_large_the_frames():
    noise = np.random.default_rng(0).integers(0, 256, (240, 320, 3), np.uint8)
    recorder, calls = VideoRecorder(30), []
    for _ in range(250):
        recorder.record(lambda: calls.append(1) or noise)
    assert len(calls) < 200, "frames that are not kept are not drawn"
    assert len(recorder.encode()) <= MAX_BYTES


@pytest.mark.parametrize("isolate", [False, True])
def test_an_episode_of_each_evaluation_is_shown(tmp_path, isolate):
    (tmp_path / "drawn.py").write_text(DRAWN)
    more = 'render_mode = "rgb_array"\nenvs = 2'
    assert train(tmp_path, live_scenario(AGENT, "drawn:Drawn", more, isolate=isolate)) == 0
    video = state(tmp_path, "video last")
    assert video["step"] == 128
    images = frames(base64.b64decode(video["png"]))
    assert [image.shape for image in images] == [(100, 166, 3)] * 9
    assert images[0][50, 140].tolist() == [200, 40, 40]
    assert video["png"] in (tmp_path / "out" / "report.html").read_text()


def test_a_video_of_cart_pole_is_in_the_report(tmp_path):
    assert train(tmp_path, live_scenario(AGENT, more='render_mode = "rgb_array"')) == 0
    video = state(tmp_path, "video last")
    images = frames(base64.b64decode(video["png"]))
    assert len(images) > 5
    assert all(len(np.unique(image.reshape(-1, 3), axis=0)) > 2 for image in images), "cart, pole and background"
    assert video["png"] in (tmp_path / "out" / "report.html").read_text()


def test_an_environment_that_cannot_draw_itself_is_evaluated_all_the_same(tmp_path, caplog):
    (tmp_path / "drawn.py").write_text(DRAWN)
    more = 'render_mode = "rgb_array"\n[run.live.args]\nbroken = true'
    assert train(tmp_path, live_scenario(AGENT, "drawn:Drawn", more, isolate=True)) == 0
    assert state(tmp_path, "video last") is None
    assert state(tmp_path, "best 0")["return"] >= 0
    assert [record.message for record in caplog.records if "no video" in record.message] == [
        "no video of the evaluation: ServerError: render() failed: AssertionError: cannot draw"
    ]


@pytest.mark.parametrize(
    ("agent", "env_class", "mode", "message"),
    [
        ('type = "ppo", trials = 128', "gymnasium:CartPole-v1", "rgb_array", "shows episodes of evaluations"),
        (AGENT, "tests.envs.helpers:LineServer", "rgb_array", "takes no such argument; accept it"),
        (AGENT, "gymnasium:CartPole-v1", "human", "render_mode"),
    ],
)
def test_videos_that_cannot_be_made_are_refused(tmp_path, agent, env_class, mode, message):
    assert message in load_error(tmp_path, live_scenario(agent, env_class, f'render_mode = "{mode}"'))


def test_an_evaluation_needs_more_than_one_server_object():
    run = {"name": "r", "live": {}, "agent": {"type": "ppo", "trials": 128, "evaluate": {"every": 64}}}
    with pytest.raises(ScenarioError, match="needs a second environment"):
        load({"name": "n", "run": [run]}, has_server=True)
