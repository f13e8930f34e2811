"""Packed weights give the same products as the weights, and follow their changes."""

import pytest
import torch

from loopwright.engines.inprocess.kv_cache import register
from loopwright.engines.inprocess.models import put_weights, tiny
from loopwright.engines.inprocess.packing import _Packed, pack

IDS = torch.tensor([[1, 2, 3, 4, 5]])


@pytest.fixture
def models():
    register()
    plain, packed = tiny(1).eval(), tiny(1).eval()
    pack(packed, min_size=0)
    assert isinstance(packed.lm_head.forward, _Packed)
    return plain, packed


@torch.inference_mode()
def logits(model):
    return model(input_ids=IDS, use_cache=False).logits


def test_packed_weights_give_the_same_products(models):
    plain, packed = models
    assert torch.allclose(logits(packed), logits(plain), atol=1e-5)


def test_new_weights_are_repacked(models):
    _, packed = models
    before, other = logits(packed), tiny(2).eval()
    put_weights(packed, other.state_dict())
    assert not torch.allclose(logits(packed), before, atol=1e-5)
    assert torch.allclose(logits(packed), logits(other), atol=1e-5)


def test_weights_changed_in_place_are_repacked(models):
    plain, packed = models
    logits(packed)
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
    assert torch.allclose(logits(packed), logits(plain), atol=1e-5)
    assert not torch.allclose(logits(packed), logits(tiny(1).eval()), atol=1e-3)


def test_small_matrices_are_not_packed():
    model = tiny(1)
    pack(model)
    assert not isinstance(model.lm_head.forward, _Packed)
