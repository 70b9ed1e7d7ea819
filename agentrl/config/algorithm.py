"""What is optimised: advantages, policy loss, corrections, KL, entropy."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import model_validator

from agentrl.config.methods import CRITIC_ESTIMATORS, DISCOUNTING, ESTIMATORS, LOSSES, MEANS_OF_TRAJECTORIES, checked_method
from agentrl.config.section import NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section, Share

__all__ = ["AdvantageRecipe", "AlgorithmRecipe", "EntropyRecipe", "ImportanceRecipe", "KLRecipe", "LossRecipe", "RejectionRecipe"]


class AdvantageRecipe(Section):
    """How much better than expected a token was. docs/algorithms.md has a row for each estimator."""

    estimator: str = "grpo"
    """A name of docs/algorithms.md, or `module:function(inputs: agentrl.algorithm.advantages.AdvantageInputs, **options)`."""
    gamma: Share = 1.0
    """Discount per generated token."""
    lam: Share = 1.0
    """GAE's lambda."""
    whiten: bool | None = None
    """Whether advantages are brought to mean 0 and variance 1 over the batch's generated tokens; by default as the estimator's source does."""
    options: dict[str, Any] = {}
    """Further arguments of the estimator."""

    @model_validator(mode="after")
    def _known(self) -> AdvantageRecipe:
        checked_method("estimator", self.estimator, self.options, ESTIMATORS)
        for key, value, used in (("gamma", self.gamma, DISCOUNTING), ("lam", self.lam, CRITIC_ESTIMATORS)):
            if value != 1.0 and self.estimator not in used and ":" not in self.estimator:
                raise ValueError(f"advantage.{key} has no effect with estimator {self.estimator}: only {', '.join(used)} use it. Leave it out")
        return self


class LossRecipe(Section):
    """The policy loss. docs/algorithms.md has a row for each."""

    name: str = "ppo"
    """A name of docs/algorithms.md, or `module:function(inputs: agentrl.algorithm.losses.LossInputs, **options)`."""
    clip_low: PositiveFloat | None = None
    """By default the loss's own (ppo: 0.2)."""
    clip_high: PositiveFloat | None = None
    """By default the loss's own (ppo: 0.2). Above clip_low: DAPO's clip-higher."""
    options: dict[str, Any] = {}
    """Further arguments of the loss, e.g. `{dual_clip: 3.0}` of ppo."""

    @property
    def arguments(self) -> dict[str, Any]:
        """All keyword arguments that are given."""
        clips = {"clip_low": self.clip_low, "clip_high": self.clip_high}
        return {name: value for name, value in clips.items() if value is not None} | self.options

    @model_validator(mode="after")
    def _known(self) -> LossRecipe:
        checked_method("loss", self.name, self.arguments, LOSSES)
        if twice := {"clip_low", "clip_high"} & self.options.keys():
            raise ValueError(f"loss: {', '.join(sorted(twice))} is a key of its own, not one of the options")
        return self


class ImportanceRecipe(Section):
    """Weights that correct proximal/behaviour (decoupled form), or current/behaviour for losses without a ratio."""

    level: Literal["token", "sequence"] = "token"
    """`sequence`: the product over the trajectory's generated tokens, on each of them."""
    truncate: PositiveFloat | None = 2.0
    """Weights are cut at this value (truncated importance sampling). None: only with `bounds`."""
    bounds: tuple[PositiveFloat, PositiveFloat] | None = None
    """Weights outside [low, high] become 0 (IcePop). Instead of `truncate`."""
    normalise: bool = False
    """Divide by the batch's mean weight."""

    @model_validator(mode="after")
    def _one_way(self) -> ImportanceRecipe:
        if (self.truncate is None) == (self.bounds is None):
            raise ValueError("importance has exactly one of truncate and bounds: set the other to null")
        if self.bounds is not None and self.bounds[0] >= self.bounds[1]:
            raise ValueError(f"importance.bounds must be [low, high] with low < high, got {list(self.bounds)}")
        return self


class RejectionRecipe(Section):
    """Tokens or trajectories that are too far off-policy are left out of the loss. They stay in the denominators and in their group's baseline."""

    statistic: Literal[
        "token_k1",
        "token_k2",
        "token_k3",
        "seq_sum_k1",
        "seq_sum_k2",
        "seq_sum_k3",
        "seq_mean_k1",
        "seq_mean_k2",
        "seq_mean_k3",
        "seq_max_k2",
        "seq_max_k3",
    ]
    """Of a token or of a trajectory. k1: the importance ratio (`seq_sum_k1` its product, `seq_mean_k1` its geometric mean); k2, k3: estimates."""
    low: PositiveFloat | None = None
    """Smallest ratio that is kept (k1 only)."""
    high: PositiveFloat
    """Largest ratio, or estimate, that is kept."""

    @model_validator(mode="after")
    def _bounds(self) -> RejectionRecipe:
        if self.statistic.endswith("k1") != (self.low is not None):
            raise ValueError("rejection: k1 statistics have low and high (bounds of the ratio); k2 and k3 have high only")
        if self.low is not None and self.low >= self.high:
            raise ValueError(f"rejection: low ({self.low:g}) must be below high ({self.high:g})")
        return self


class KLRecipe(Section):
    """A leash to a reference policy."""

    where: Literal["none", "reward", "loss"] = "none"
    """`reward`: taken off each generated token's reward. `loss`: added to the policy loss."""
    estimate: Literal["k1", "abs", "k2", "k3", "k3_straight_through"] = "k1"
    """In the loss, k1 has no useful gradient on-policy; k3 (low_var_kl) is usual, `k3_straight_through` has k3's value and k2's gradient."""
    coefficient: NonNegativeFloat = 0.001
    """Weight of the divergence (nats); where the controller adapts it, its first value."""
    controller: Literal["fixed", "adaptive"] = "fixed"
    """`adaptive`: the coefficient follows `target` (Ziegler et al. 2019); it is kept in checkpoints."""
    target: PositiveFloat | None = None
    """KL per token that the adaptive controller aims at."""
    horizon: Positive | None = None
    """Trajectories over which the adaptive controller acts."""
    reference: str | None = None
    """Directory or hub name; by default the run's initial weights (with model.lora: the model without its adapters)."""

    @model_validator(mode="after")
    def _consistent(self) -> KLRecipe:
        given = [name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default]
        if self.where == "none" and given:
            raise ValueError(f"kl.{given[0]} has no effect with kl.where none: set kl.where to reward or loss, or leave it out")
        adaptive = self.controller == "adaptive"
        if adaptive and self.coefficient == 0:
            raise ValueError("kl.controller adaptive multiplies kl.coefficient, which is 0: give it a first value")
        if adaptive != (self.target is not None) or adaptive != (self.horizon is not None):
            raise ValueError("kl.controller adaptive needs kl.target and kl.horizon; fixed takes neither")
        if adaptive and self.where != "reward":
            raise ValueError("kl.controller adaptive acts on a KL in the reward: set kl.where to reward")
        if self.where == "reward" and self.estimate == "k3_straight_through":
            raise ValueError("kl.estimate k3_straight_through differs from k3 in its gradient only, and a KL in the reward has none: use k3")
        return self


class EntropyRecipe(Section):
    """An entropy bonus, masked and aggregated as the loss."""

    coefficient: NonNegativeFloat = 0.0
    """Weight of the mean entropy (nats) in the objective."""
    schedule: Literal["constant", "linear"] = "constant"
    """`linear`: to 0 at the end of the run."""

    @model_validator(mode="after")
    def _some(self) -> EntropyRecipe:
        if self.coefficient == 0 and self.schedule != "constant":
            raise ValueError("entropy.schedule has no effect with entropy.coefficient 0")
        return self


class AlgorithmRecipe(Section):
    """What is optimised."""

    advantage: AdvantageRecipe = AdvantageRecipe()
    proximal: Literal["behaviour", "recompute", "interpolate"] = "behaviour"
    """The policy whose ratio to the current one is clipped. `behaviour`: the one that sampled (two-policy form). `recompute`: the learner at the
    start of the step, one more forward pass (decoupled form). `interpolate`: between the two by the token's age, without that pass."""
    loss: LossRecipe = LossRecipe()
    aggregation: Literal["token_mean", "token_sum", "seq_mean_token_sum", "seq_mean_token_sum_norm", "seq_mean_token_mean"] = "token_mean"
    """From losses of tokens to one number, by counts of the whole update. gspo, gmpo and sapo are `seq_mean_token_mean`
    by definition."""
    aggregation_horizon: PositiveFloat | None = None
    """What `seq_mean_token_sum_norm` divides by (Dr. GRPO: the most tokens a trajectory may generate)."""
    importance: ImportanceRecipe = ImportanceRecipe()
    rejection: list[RejectionRecipe] = []
    """All must hold."""
    kl: KLRecipe = KLRecipe()
    entropy: EntropyRecipe = EntropyRecipe()
    max_token_age: NonNegative | None = None
    """Tokens staler than this many steps are masked from the loss (train_mask)."""
    gae_over_observations: bool = False
    """Ablation: the critic, GAE and whitening treat observation tokens like generated ones, as Search-R1 does."""
    train_on_observations: bool = False
    """Ablation: the loss also trains on observation tokens, as Search-R1 without its mask. They count as generated everywhere: in advantages and
    whitening, the critic, a KL in the reward, denominators and `learner/tokens`."""

    @model_validator(mode="after")
    def _effective(self) -> AlgorithmRecipe:
        """Refuse what would silently have no effect."""
        ratio_corrects = self.proximal == "behaviour" and LOSSES.get(self.loss.name, ("weights",))[0] == "ratio"  # your own: asked when it runs
        if ratio_corrects and self.importance != ImportanceRecipe():
            raise ValueError(
                f"algorithm.importance has no effect with proximal behaviour and loss {self.loss.name}: its ratio is the importance weight. Set"
                " algorithm.proximal to recompute, or leave importance out"
            )
        if self.loss.name == "gmpo" and self.importance.bounds is not None:
            raise ValueError(
                "algorithm.importance.bounds: gmpo takes the geometric mean of the weights, in which one of 0 means nothing; use truncate"
            )
        if self.advantage.estimator == "gpg" and self.kl.where == "reward":
            raise ValueError("estimator gpg counts rewards that are not 0, and a KL in the reward leaves none: set algorithm.kl.where to loss")
        if self.proximal == "interpolate" and self.importance.normalise:
            raise ValueError("algorithm.importance.normalise needs the batch's weights before its first update: set algorithm.proximal to recompute")
        if (self.aggregation == "seq_mean_token_sum_norm") != (self.aggregation_horizon is not None):
            raise ValueError("algorithm.aggregation_horizon belongs to aggregation seq_mean_token_sum_norm, which needs it")
        if self.loss.name in MEANS_OF_TRAJECTORIES and self.aggregation not in ("token_mean", "seq_mean_token_mean"):
            raise ValueError(f"loss {self.loss.name} is defined as a mean over trajectories: leave algorithm.aggregation out")
        return self
