"""RLlib's networks for observations in parts: an encoder per part, whose outputs are joined."""

from typing import Any

import gymnasium as gym
from ray.rllib.algorithms.dqn.dqn_catalog import DQNCatalog
from ray.rllib.algorithms.ppo.ppo_catalog import PPOCatalog
from ray.rllib.core.columns import Columns
from ray.rllib.core.models.catalog import Catalog
from ray.rllib.core.models.configs import ModelConfig, MultiStreamEncoderConfig
from ray.rllib.core.models.torch.encoder import TorchMultiStreamEncoder


class PartsEncoder(TorchMultiStreamEncoder):
    """RLlib's encoder of several streams, which here are the parts of the observation."""

    def _forward(self, inputs: dict[str, Any], **kwargs: Any) -> Any:  # type: ignore[override]
        return super()._forward(inputs[Columns.OBS], **kwargs)  # type: ignore[no-untyped-call]


class PartsEncoderConfig(MultiStreamEncoderConfig):
    """Builds a `PartsEncoder`."""

    def build(self, framework: str = "torch") -> PartsEncoder:
        self._validate(framework)
        return PartsEncoder(self)


class PartsCatalog(Catalog):
    """Chooses RLlib's own encoder for each part of a Dict, and for any other space as RLlib does."""

    @classmethod
    def _get_encoder_config(
        cls, observation_space: gym.Space[Any], model_config_dict: dict[str, Any], action_space: Any = None
    ) -> ModelConfig:
        choose_encoder = super()._get_encoder_config
        if not isinstance(observation_space, gym.spaces.Dict):
            return choose_encoder(observation_space, model_config_dict, action_space)
        # A copy for each part: RLlib writes the convolutions for the size of an image into it.
        encoders = {
            name: choose_encoder(part, dict(model_config_dict), action_space)
            for name, part in observation_space.spaces.items()
        }
        return PartsEncoderConfig(
            base_encoder_configs=encoders,
            hidden_layer_dims=model_config_dict["fcnet_hiddens"][-1:],
            hidden_layer_activation=model_config_dict["fcnet_activation"],
        )


class PpoPartsCatalog(PartsCatalog, PPOCatalog):
    """PPO's components, with an encoder per part."""


class DqnPartsCatalog(PartsCatalog, DQNCatalog):
    """DQN's components, with an encoder per part."""
