"""A small neural network that learns to tell two spirals apart, and reports its validation loss after each epoch."""

from collections.abc import Iterator

import numpy as np

EPOCHS = 81


def spirals(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Points on two interleaved spirals, with noise, and which of the two each is on."""
    random = np.random.default_rng(seed)
    labels = np.arange(count) % 2
    turn = random.uniform(0.5, 3.0, count)
    angle = turn * 2.0 + np.pi * labels
    points = np.stack([turn * np.cos(angle), turn * np.sin(angle)], axis=1) / 3.0
    return points + random.normal(0.0, 0.15, points.shape), labels


def train(
    rate: float, momentum: float, width: int, scale: float, decay: float, seed: int = 0
) -> Iterator[dict[str, float]]:
    """Train a network with one hidden layer; a generator, so that a stop rule can end it after any epoch."""
    random = np.random.default_rng(seed)
    inputs, labels = spirals(300, 1)
    held_out, held_out_labels = spirals(1000, 2)
    weights = [
        random.normal(0.0, scale, (2, width)),
        random.normal(0.0, scale, width),
        random.normal(0.0, 1.0 / np.sqrt(width), width),
        np.zeros(1),
    ]
    velocity = [np.zeros_like(weight) for weight in weights]
    for _ in range(EPOCHS):
        for batch in np.array_split(random.permutation(len(labels)), 4):
            hidden = np.tanh(inputs[batch] @ weights[0] + weights[1])
            error = (_sigmoid(hidden @ weights[2] + weights[3]) - labels[batch]) / len(batch)
            back = np.outer(error, weights[2]) * (1.0 - hidden**2)
            gradients = [inputs[batch].T @ back, back.sum(0), hidden.T @ error, error.sum(keepdims=True)]
            for weight, speed, gradient in zip(weights, velocity, gradients, strict=True):
                speed *= momentum
                speed -= rate * (gradient + decay * weight)
                weight += speed
        output = np.tanh(held_out @ weights[0] + weights[1]) @ weights[2] + weights[3]
        # The loss of a logistic model, written so that large outputs do not overflow.
        loss = np.logaddexp(0.0, np.where(held_out_labels == 1, -output, output)).mean()
        yield {"loss": float(loss), "accuracy": float(((output > 0) == held_out_labels).mean())}


def _sigmoid(value: np.ndarray) -> np.ndarray:
    return 0.5 * (1.0 + np.tanh(0.5 * value))
