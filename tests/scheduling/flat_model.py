"""Steps that take a second for each token, so that a target of gaps is a number of tokens."""

from __future__ import annotations

from pd_cluster.scheduling.step_model import FIRST_KNOTS, TOKEN_S, StepModel


def flat_model(keys_per_token: int = 0) -> StepModel:
    """`keys_per_token`: keys that take a second too; 0: none do."""
    model = StepModel()
    key_s = 1 / keys_per_token if keys_per_token else 1e-12
    model._restart([0.0, 0.0, key_s, 1.0, *(1.0 for _ in TOKEN_S), *(0.0 for _ in FIRST_KNOTS)])
    return model
