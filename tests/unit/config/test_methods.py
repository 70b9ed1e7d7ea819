"""What recipes may name is what there is to be named."""

import inspect

import pytest
from pydantic import ValidationError

from agentrl.algorithm.advantages import ESTIMATORS as ESTIMATORS_THERE
from agentrl.algorithm.losses import POLICY_LOSSES
from agentrl.algorithm.rejection import STATISTICS
from agentrl.config.algorithm import AlgorithmRecipe, RejectionRecipe
from agentrl.config.methods import CRITIC_ESTIMATORS, DISCOUNTING, ESTIMATORS, LOSSES, MEANS_OF_TRAJECTORIES

NOT_OPTIONS = {"gamma", "lam", "seed"}  # keys of their own, or the learner's


def keywords(function):
    parameters = inspect.signature(function).parameters.values()
    return {parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY} - NOT_OPTIONS


def test_every_estimator_and_its_options_can_be_named():
    assert set(ESTIMATORS) == set(ESTIMATORS_THERE)
    for name, estimator in ESTIMATORS_THERE.items():
        assert set(ESTIMATORS[name]) == keywords(estimator.function), name
        assert (name in CRITIC_ESTIMATORS) == ("values" in estimator.needs), name
        assert (name in DISCOUNTING) == ("gamma" in inspect.signature(estimator.function).parameters), name


def test_every_loss_and_its_options_can_be_named():
    assert set(LOSSES) == set(POLICY_LOSSES)
    for name, loss in POLICY_LOSSES.items():
        kind, *options = LOSSES[name]
        assert set(options) == keywords(loss.function) | (keywords(loss.selection) if loss.selection else set()), name
        assert (kind == "ratio") == loss.ratio, name
        assert (name in MEANS_OF_TRAJECTORIES) == (loss.aggregation == "seq_mean_token_mean"), name


def test_every_rejection_statistic_can_be_named():
    for statistic in STATISTICS:
        RejectionRecipe(statistic=statistic, low=0.5 if statistic.endswith("k1") else None, high=2.0)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"advantage": {"estimator": "gropo"}}, "did you mean grpo"),
        ({"advantage": {"estimator": "grpo", "options": {"weights": [1]}}}, "does not take weights; it takes no options"),
        ({"advantage": {"estimator": "rloo", "gamma": 0.99}}, "only gae, vtrace, reinforce_plus_plus use it"),
        ({"advantage": {"estimator": "reinforce_plus_plus", "lam": 0.9}}, "only gae, vtrace use it"),
        ({"loss": {"name": "ppo", "options": {"beta": 1}}}, "it takes clip_low, clip_high, dual_clip"),
        ({"loss": {"name": "reinforce", "clip_low": 0.2}}, "does not take clip_low"),
        ({"importance": {"truncate": 5.0}}, "has no effect with proximal behaviour"),
        ({"importance": {"truncate": 2.0, "bounds": [0.5, 2.0]}}, "exactly one of truncate and bounds"),
        ({"proximal": "interpolate", "importance": {"normalise": True}}, "set algorithm.proximal to recompute"),
        ({"aggregation": "seq_mean_token_sum_norm"}, "aggregation_horizon"),
        ({"loss": {"name": "gspo"}, "aggregation": "token_sum"}, "defined as a mean over trajectories"),
        ({"rejection": [{"statistic": "token_k3", "low": 0.1, "high": 1.0}]}, "k2 and k3 have high only"),
        ({"kl": {"where": "loss", "controller": "adaptive", "target": 1.0, "horizon": 10}}, "acts on a KL in the reward"),
        ({"kl": {"coefficient": 0.1}}, "kl.coefficient has no effect with kl.where none"),
        ({"kl": {"where": "reward", "controller": "adaptive", "target": 1.0, "horizon": 10, "coefficient": 0}}, "give it a first value"),
        ({"entropy": {"schedule": "linear"}}, "no effect with entropy.coefficient 0"),
        ({"loss": {"clip_low": 0.3, "options": {"clip_low": 0.1}}}, "clip_low is a key of its own"),
        ({"loss": {"name": "gmpo"}, "proximal": "recompute", "importance": {"truncate": None, "bounds": [0.5, 2.0]}}, "use truncate"),
        ({"advantage": {"estimator": "gpg"}, "kl": {"where": "reward"}}, "set algorithm.kl.where to loss"),
        ({"kl": {"where": "reward", "estimate": "k3_straight_through"}}, "a KL in the reward has none"),
    ],
)
def test_what_would_have_no_effect_is_refused(settings, told):
    with pytest.raises(ValidationError, match=told):
        AlgorithmRecipe.model_validate(settings)
