"""How far the learner is from the policy that sampled. B trajectories, T tokens.

    sums, extremes = gap_sums(learner_BT, behaviour_BT, mask_BT)      of a micro-batch
    total, extreme = sums + .., torch.maximum(extremes, ..)           over micro-batches, then over ranks
    gap_metrics(total, extreme)                                       {"kl_k1": .., "chi2_sequence": ..}

Formulas as documented by verl 0.9.1 for its off-policy metrics; a trajectory without a token in the mask counts in none of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agentrl.algorithm.importance import MAX_LOG_RATIO, effective_sample_share
from agentrl.algorithm.kl import k1, k3

__all__ = ["GAP_EXTREMES", "GAP_SUMS", "gap_metrics", "gap_sums"]

# What `gap_sums` adds up, in order: over tokens, then over trajectories.
GAP_SUMS = (
    *("tokens", "k1", "k3", "apart", "ratio", "ratio_squared"),
    *("trajectories", "learner_ppl", "learner_log_ppl", "behaviour_ppl", "behaviour_log_ppl"),
    *("log_ppl_gap", "log_ppl_gap_abs", "ppl_ratio", "sequence_ratio_squared"),
)
# What it takes the largest of, in order: a smallest value is minus the largest of the negatives.
GAP_EXTREMES = ("logprob_gap_max", "ratio_max", "-ratio_min", "log_ppl_gap_max", "-log_ppl_gap_min")


@torch.no_grad()
def gap_sums(learner_BT: Tensor, behaviour_BT: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Sums and extremes over the mask, float64.

    Args:
        learner_BT: the learner's log-probs.
        behaviour_BT: those recorded when the tokens were sampled.
        mask_BT: tokens to look at, 0/1 or bool. Values elsewhere are never looked at.

    Returns:
        `GAP_SUMS` [15], which add over micro-batches and ranks, and `GAP_EXTREMES` [5], of which the maximum is taken (-inf where the mask
        is empty).
    """
    inside_BT = mask_BT.bool()
    rows_B = inside_BT.any(-1)
    inside_BT = inside_BT[rows_B]
    learner_BT = learner_BT[rows_B].double().masked_fill(~inside_BT, 0.0)
    behaviour_BT = behaviour_BT[rows_B].double().masked_fill(~inside_BT, 0.0)
    tokens, token_extremes = _of_tokens(learner_BT[inside_BT], behaviour_BT[inside_BT])
    rows, row_extremes = _of_rows(learner_BT.sum(-1), behaviour_BT.sum(-1), inside_BT.sum(-1))
    return torch.cat([tokens, rows]), torch.cat([token_extremes, row_extremes])


def gap_metrics(sums: Tensor, extremes: Tensor) -> dict[str, float]:
    """What the totals mean; empty where there was no token.

    kl_k1, kl_k3: KL(behaviour || learner) a token. logprob_gap_*: how far the log-probs of a token are apart, in nats. ratio_*: learner /
    behaviour of tokens. ess: effective share of the tokens. *_ppl: mean of the trajectories' perplexities. log_ppl_gap: how much less
    likely, a token, the learner finds a trajectory; ppl_ratio: mean of its exponential. chi2_token, chi2_sequence: mean of the squared
    ratio of a token, of a whole trajectory, less 1: the variance that importance weights would have.
    """
    total = dict(zip(GAP_SUMS, sums.tolist(), strict=True))
    extreme = dict(zip(GAP_EXTREMES, extremes.tolist(), strict=True))
    tokens, trajectories = total["tokens"], total["trajectories"]
    if tokens == 0:
        return {}
    ess = effective_sample_share(*(sums[GAP_SUMS.index(name)] for name in ("ratio", "ratio_squared", "tokens")))
    of_trajectories = ("learner_ppl", "learner_log_ppl", "behaviour_ppl", "behaviour_log_ppl", "log_ppl_gap", "log_ppl_gap_abs", "ppl_ratio")
    return {
        "kl_k1": total["k1"] / tokens,
        "kl_k3": total["k3"] / tokens,
        "logprob_gap_mean": total["apart"] / tokens,
        "logprob_gap_max": extreme["logprob_gap_max"],
        "ess": ess.item(),
        "ratio_mean": total["ratio"] / tokens,
        "ratio_max": extreme["ratio_max"],
        "ratio_min": -extreme["-ratio_min"],
        **{name: total[name] / trajectories for name in of_trajectories},
        "log_ppl_gap_max": extreme["log_ppl_gap_max"],
        "log_ppl_gap_min": -extreme["-log_ppl_gap_min"],
        "chi2_token": total["ratio_squared"] / tokens - 1.0,
        "chi2_sequence": total["sequence_ratio_squared"] / trajectories - 1.0,
    }


def _of_tokens(learner_N: Tensor, behaviour_N: Tensor) -> tuple[Tensor, Tensor]:
    apart_N = (learner_N - behaviour_N).abs()
    ratio_N = _ratio(learner_N - behaviour_N)
    count = ratio_N.new_tensor(len(ratio_N))
    summed = (k1(behaviour_N, learner_N), k3(behaviour_N, learner_N), apart_N, ratio_N, ratio_N.square())
    return torch.stack([count, *(values_N.sum() for values_N in summed)]), torch.cat([_extremes(apart_N)[:1], _extremes(ratio_N)])


def _of_rows(learner_B: Tensor, behaviour_B: Tensor, tokens_B: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row's summed log-probs and its number of tokens."""
    learner_log_ppl_B, behaviour_log_ppl_B = -learner_B / tokens_B, -behaviour_B / tokens_B
    gap_B = learner_log_ppl_B - behaviour_log_ppl_B
    summed = (
        *(_ratio(learner_log_ppl_B), learner_log_ppl_B, _ratio(behaviour_log_ppl_B), behaviour_log_ppl_B),
        *(gap_B, gap_B.abs(), _ratio(gap_B), _ratio(learner_B - behaviour_B).square()),
    )
    return torch.stack([gap_B.new_tensor(len(gap_B)), *(values_B.sum() for values_B in summed)]), _extremes(gap_B)


def _ratio(logarithm: Tensor) -> Tensor:
    """Its exponential, within what means anything: one broken token must not make a metric infinite."""
    return logarithm.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _extremes(values: Tensor) -> Tensor:
    """The largest value, and minus the smallest."""
    if len(values) == 0:
        return values.new_full((2,), -torch.inf)
    return torch.stack([values.max(), -values.min()])
