"""Logistic regression with a handful of weights."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

_RIDGE = 1.0
"""Pull towards 0, in units of one observation: keeps weights finite where data says nothing."""


def sigmoid(log_odds: Array) -> Array:
    """1 / (1 + e^-x), without overflow."""
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * log_odds)))


def fit_logistic(rows: Array, labels: Array, *, num_iterations: int = 12) -> Array:
    """Weights that explain 0/1 ``labels``, the constant last: float64 [num_columns + 1].

    rows: real [num_rows, num_columns]; labels: [num_rows]. Newton's method on the log-likelihood
    with a small ridge term; without rows all weights are 0.
    """
    design = np.hstack([np.asarray(rows, np.float64), np.ones((rows.shape[0], 1))])
    weights = np.zeros(design.shape[1])
    for _ in range(num_iterations):
        chance = sigmoid(design @ weights)
        slope = design.T @ (labels - chance) - _RIDGE * weights
        curvature = (design * (chance * (1 - chance))[:, None]).T @ design
        step = np.linalg.solve(curvature + _RIDGE * np.eye(weights.size), slope)
        weights += step * min(1.0, 4.0 / (np.abs(step).max() + 1e-12))
        if np.abs(step).max() < 1e-6:
            break
    return weights
