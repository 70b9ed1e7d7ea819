"""Every method through a whole training step: the numbers are the same however the batch is cut, and mean what they should."""

import math
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from learner_scene import random_groups, tiny_model, tiny_recipe, trajectory
from torch.testing import assert_close

from agentrl.algorithm.advantages import Estimator
from agentrl.algorithm.group_advantages import grpo
from agentrl.algorithm.losses import PolicyLoss, ppo, reinforce
from agentrl.config.methods import CRITIC_ESTIMATORS, ESTIMATORS, LOSSES
from agentrl.errors import AgentRLError, ConfigError
from agentrl.learner.batch import TrainingBatch
from agentrl.learner.learner import Learner
from agentrl.learner.memory import Cut, within_memory
from agentrl.learner.policy import PolicyModel
from agentrl.learner.ranks import Ranks
from agentrl.types import Reward, StopReason

pytestmark = pytest.mark.slow

CLOSE = ("grad_norm", "kl_k1", "ess", "entropy", "clip_low_share", "clip_high_share", "advantage_std")


@pytest.fixture
def learner_of(model_dir, tmp_path):
    def build(**overrides):
        return Learner.build(tiny_recipe(**overrides), model_dir, Ranks.single(), tmp_path)

    return build


def batch_of(*, greedy=False, near=None):
    """Groups with a reward part, rewards in mid-episode, tokens of two ages; with `near`, behaviour log-probs are that policy's own."""
    groups = random_groups()
    for group in groups:
        for k, row in enumerate(group):
            written = [int(token) for token in row.loss_mask.nonzero()[0]]
            reward = Reward(total=1.0 + k / 4, parts={"right": k / 4, "form": 1.0}, tokens=(written[0], written[-1]), amounts=(1.0, k / 4))
            group[k] = replace(row, reward=reward)
            if near is not None:
                ids, mask = torch.from_numpy(row.token_ids).long()[None], torch.from_numpy(row.loss_mask)[None] == 1
                with torch.no_grad():
                    row.behaviour_logprobs[:] = near(ids, mask, torch.ones(1))[0][0].numpy()
        if greedy:
            group.append(trajectory([1, 5, 6], [0, 1, 1], reward=0.5, k=len(group), temperature=0.0))
    return TrainingBatch.of(groups, {0: 2})


def agree(learner_of, batch, **settings):
    """Whole and in five micro-batches or more: equal to 1e-6."""
    whole, cut = learner_of(**settings), learner_of(**settings, learner__trajectories_per_micro_batch=2)
    one, many = whole.train(batch, step=0, progress=0.0).metrics, cut.train(batch, step=0, progress=0.0).metrics
    assert math.isfinite(one["learner/loss"])
    assert one["learner/loss"] == pytest.approx(many["learner/loss"], rel=1e-6, abs=1e-6)
    for name in CLOSE:
        assert one[f"learner/{name}"] == pytest.approx(many[f"learner/{name}"], rel=1e-4, abs=1e-6), name
    assert one["learner/grad_norm"] > 0
    return one


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_trains_alike_whole_and_cut(learner_of, name):
    options = {"parts": ["right", "form"]} if name == "gdpo" else {}
    critic = {} if name in CRITIC_ESTIMATORS else None
    advantage = {"estimator": name, "options": options}
    agree(learner_of, batch_of(greedy=name == "remax"), algorithm__advantage=advantage, critic=critic)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("proximal", ["behaviour", "recompute", "interpolate"])
def test_every_loss_trains_alike_whole_and_cut(learner_of, name, proximal):
    agree(learner_of, batch_of(), algorithm__loss={"name": name}, algorithm__proximal=proximal)


@pytest.mark.parametrize("how", ["token_sum", "seq_mean_token_sum", "seq_mean_token_sum_norm", "seq_mean_token_mean"])
def test_every_aggregation_trains_alike_whole_and_cut(learner_of, how):
    horizon = 8.0 if how.endswith("norm") else None
    settings = {"algorithm__aggregation": how, "algorithm__aggregation_horizon": horizon, "algorithm__entropy": {"coefficient": 0.01}}
    agree(learner_of, batch_of(), **settings)


@pytest.mark.parametrize(
    "importance",
    [
        {"level": "sequence"},
        {"truncate": None, "bounds": [0.5, 2.0]},
        {"normalise": True},
        {"level": "sequence", "normalise": True},
    ],
)
def test_every_correction_trains_alike_whole_and_cut(learner_of, importance):
    learner = learner_of()
    batch = batch_of(near=learner.state.policy)
    batch = replace(batch, behaviour_N=batch.behaviour_N + 0.3 * torch.sin(torch.arange(len(batch.behaviour_N))) * batch.loss_mask_N)
    settings = {"algorithm__proximal": "recompute", "algorithm__importance": importance}
    found = agree(learner_of, batch, **settings)
    if importance.get("normalise"):
        assert found["learner/importance_mean"] == pytest.approx(1.0, abs=0.2)  # over tokens with a gradient


def test_weights_that_are_normalised_have_mean_one(learner_of):
    learner = learner_of()
    batch = batch_of(near=learner.state.policy)
    batch = replace(batch, behaviour_N=batch.behaviour_N - 0.5 * batch.loss_mask_N)  # every ratio is exp(0.5)
    settings = {"algorithm__proximal": "recompute", "learner__learning_rate": 0.0}
    plain = learner_of(**settings).train(batch, step=0, progress=0.0).metrics
    even = learner_of(**settings, algorithm__importance={"normalise": True}).train(batch, step=0, progress=0.0).metrics
    assert plain["learner/importance_mean"] == pytest.approx(math.exp(0.5), rel=1e-4)
    assert even["learner/importance_mean"] == pytest.approx(1.0, rel=1e-4)


def test_rejection_leaves_out_whole_trajectories_and_keeps_the_denominator(learner_of):
    learner = learner_of()
    batch = batch_of(near=learner.state.policy)
    far = batch.spread(torch.arange(12) == 3)  # one trajectory's tokens are e times as likely now
    batch = replace(batch, behaviour_N=batch.behaviour_N - 1.0 * (far & batch.loss_mask_N))
    rule = [{"statistic": "seq_mean_k1", "low": 0.5, "high": 2.0}]
    settings = {"algorithm__rejection": rule, "algorithm__loss": {"name": "reinforce"}}
    found = agree(learner_of, batch, **settings)
    share = batch.count(batch.loss_mask_N)[3] / batch.loss_mask_N.sum()
    assert found["learner/rejected_share"] == pytest.approx(share.item(), abs=1e-6)


def test_a_leash_in_the_reward_takes_off_what_the_policy_prefers_to_the_reference(learner_of, tmp_path):
    other = tiny_model(tmp_path / "other", seed=9)
    learner = learner_of(
        algorithm__kl={"where": "reward", "coefficient": 0.5, "reference": str(other)}, algorithm__advantage={"estimator": "dr_grpo"}
    )
    batch = batch_of(near=learner.state.policy)
    group = [replace(row, reward=Reward(total=0.0)) for row in batch.trajectories[:2]]  # all that is earned is the penalty
    batch = TrainingBatch.of([group], {0: 0})
    reference, apart = PolicyModel.load(other), []
    for row in group:
        ids, mask = torch.from_numpy(row.token_ids).long()[None], torch.from_numpy(row.loss_mask)[None] == 1
        with torch.no_grad():
            apart.append((torch.from_numpy(row.behaviour_logprobs) - reference(ids, mask, torch.ones(1))[0][0])[mask[0]])
    found = learner.train(batch, step=0, progress=0.0).metrics
    assert found["learner/kl_reference"] == pytest.approx((apart[0].mean() + apart[1].mean()).item() / 2, abs=1e-5)
    # rewards are -0.5 x the sums, advantages half their difference, once up and once down
    half = 0.25 * abs((apart[0].sum() - apart[1].sum()).item())
    share = len(apart[0]) / (len(apart[0]) + len(apart[1]))
    assert found["learner/advantage_std"] == pytest.approx(2 * half * math.sqrt(share * (1 - share)), rel=1e-4)


def test_a_leash_in_the_loss_starts_at_nothing_and_then_pulls(learner_of):
    learner = learner_of(algorithm__kl={"where": "loss", "estimate": "k3", "coefficient": 10.0})
    first = learner.train(batch_of(near=learner.state.policy), step=0, progress=0.0).metrics
    assert first["learner/kl_reference_k3"] == pytest.approx(0.0, abs=1e-6)
    free = learner_of(learner__learning_rate=1e-2)
    for step in range(1, 6):
        learner.train(batch_of(near=learner.state.policy), step=step, progress=0.0)
        free.train(batch_of(near=free.state.policy), step=step, progress=0.0)
    leashed = learner.train(batch_of(near=learner.state.policy), step=6, progress=0.0).metrics["learner/kl_reference_k3"]
    measured = learner_of(algorithm__kl={"where": "loss", "estimate": "k3", "coefficient": 0.0})
    measured.state.policy.load_state_dict(free.state.policy.state_dict())
    wandered = measured.train(batch_of(near=free.state.policy), step=6, progress=0.0).metrics["learner/kl_reference_k3"]
    assert 0 < leashed < 0.5 * wandered, (leashed, wandered)


def test_the_adaptive_coefficient_rises_while_the_policy_is_too_far(learner_of):
    kl = {"where": "reward", "estimate": "k1", "coefficient": 0.1, "controller": "adaptive", "target": 1e-9, "horizon": 12}
    learner = learner_of(algorithm__kl=kl)
    reference = learner.state.policy
    batch = batch_of(near=reference)
    learner.train(batch, step=0, progress=0.0)  # at the reference itself: k1 is 0 but for rounding, below the target by all of it or not
    learner.state.controllers.kl_coefficient = 0.1
    one = learner.train(batch, step=0, progress=0.0).metrics
    # the error is clipped at a fifth, the batch is one horizon of 12 trajectories: 0.1 x 1.2 or, where k1 came out negative, 0.1 x 0.8
    factor = 1.2 if one["learner/kl_reference"] > 0 else 0.8
    assert learner.state.controllers.kl_coefficient == pytest.approx(0.1 * factor)


def test_the_critic_learns_what_its_states_are_worth(learner_of):
    learner = learner_of(critic={"learning_rate": 1e-2, "warmup_steps": 30}, algorithm__advantage={"estimator": "gae"})
    before = {name: weight.detach().clone() for name, weight in learner.state.policy.named_weights()}
    found = [learner.train(batch_of(), step=step, progress=0.0).metrics for step in range(30)]
    assert found[0]["critic/explained_variance"] == pytest.approx(0.0, abs=1e-6)  # a new head says 0 everywhere
    assert found[-1]["critic/explained_variance"] > 0.8
    assert found[-1]["critic/loss"] < 0.2 * found[0]["critic/loss"]
    assert all(torch.equal(weight, before[name]) for name, weight in learner.state.policy.named_weights())  # warm-up: the critic alone


def test_a_policy_without_a_finite_update_is_not_saved_by_its_critic(learner_of, tmp_path):
    learner = learner_of(critic={"learning_rate": 1e-2}, algorithm__advantage={"estimator": "gae"}, algorithm__loss={"name": f"{__name__}:nothing"})
    for step in range(2):
        report = learner.train(batch_of(), step=step, progress=0.0)
        assert (report.updates_done, report.updates_skipped, report.skipped_in_row) == (0, 1, step + 1)
        assert (report.metrics["critic/updates_done"], report.metrics["learner/updates_skipped"]) == (1.0, 1.0)


def nothing(inputs):
    """A user's loss, of which nothing finite comes."""
    return inputs.logp_BT * math.nan if len(inputs.logp_BT) > 1 else inputs.logp_BT


def test_the_policys_warm_up_begins_when_the_critic_stops_being_alone(learner_of):
    critic = {"warmup_steps": 2}
    learner = learner_of(critic=critic, algorithm__advantage={"estimator": "gae"}, learner__schedule={"warmup": 2})
    rates = [learner.train(batch_of(), step=step, progress=0.0).metrics.get("learner/learning_rate") for step in range(4)]
    assert rates == [None, None, pytest.approx(5e-3), pytest.approx(1e-2)]


def test_reward_parts_of_which_there_are_none_are_refused(learner_of):
    learner = learner_of(algorithm__advantage={"estimator": "gdpo", "options": {"parts": ["rihgt"]}})
    with pytest.raises(ConfigError, match="rewards have the parts form, right, and none of rihgt"):
        learner.train(batch_of(), step=0, progress=0.0)


def test_ablations_over_observations_count_them(learner_of):
    batch = batch_of()
    response, own = batch.response_N.sum().item(), batch.loss_mask_N.sum().item()
    trained = agree(learner_of, batch, algorithm__train_on_observations=True)
    assert trained["learner/tokens"] == response > own
    agree(learner_of, batch, algorithm__gae_over_observations=True, algorithm__advantage={"estimator": "gae", "lam": 0.9}, critic={})


def test_masked_stops_stay_in_the_baseline(learner_of):
    def row(reward, k, stop):
        return replace(trajectory([1, 5 + k, 6], [0, 1, 1], reward=reward, k=k), stop=stop)

    group = [row(1.0, 0, StopReason.ANSWERED), row(0.0, 1, StopReason.CONTEXT_LIMIT)]
    settings = {"buffer": {"stops": {"context_limit": "mask"}}, "algorithm__advantage": {"estimator": "dr_grpo"}}
    found = learner_of(**settings).train(TrainingBatch.of([group], {0: 0}), step=0, progress=0.0).metrics
    assert found["learner/tokens"] == 2
    assert found["learner/advantage_std"] == pytest.approx(0.5)  # advantages +-0.5: the masked reward is in the mean


def runs_out_of(memory_tokens, limit, error):
    def work(cut):
        memory_tokens.append(cut.tokens)
        if cut.tokens > limit:
            raise error
        return cut.tokens

    return work


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory")]
)
def test_out_of_memory_is_tried_once_more_with_half(model_dir, error, caplog):
    tried = []
    cut = Cut(tokens=16384, trajectories=None)
    assert within_memory(runs_out_of(tried, 10000, error), cut, models=[], ranks=Ranks.single(), step=7, longest=900) == 8192
    assert tried == [16384, 8192]
    assert "out of memory at step 7, longest row 900 tokens: lower learner.tokens_per_micro_batch (now 16,384)" in caplog.text
    with pytest.raises(AgentRLError, match="half of it was not enough either"):
        within_memory(runs_out_of(tried, 5000, error), cut, models=[], ranks=Ranks.single(), step=7, longest=900)


def test_other_errors_are_not_taken_for_a_lack_of_memory(model_dir):
    with pytest.raises(RuntimeError, match="shape"):
        within_memory(
            runs_out_of([], 0, RuntimeError("shape mismatch")), Cut(tokens=8, trajectories=None), models=[], ranks=Ranks.single(), step=0, longest=1
        )


@pytest.mark.parametrize("during", ["forward", "backward"])
def test_a_pass_that_broke_off_leaves_nothing_behind(learner_of, during):
    batch, settings = batch_of(), {"algorithm__entropy": {"coefficient": 0.01}, "learner__tokens_per_micro_batch": 120}
    plain, broken = learner_of(**settings | {"learner__tokens_per_micro_batch": 60}), learner_of(**settings)
    layer, calls = broken.state.policy.causal.base_model.layers[0], []

    def fail_at_the_second(*_):
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")

    hook = layer.register_forward_pre_hook if during == "forward" else layer.mlp.register_full_backward_pre_hook
    hook(fail_at_the_second)
    found = broken.train(batch, step=0, progress=0.0)
    assert found.metrics["learner/out_of_memory"] == 1
    expected = plain.train(batch, step=0, progress=0.0)
    assert found.metrics["learner/loss"] == pytest.approx(expected.metrics["learner/loss"], abs=1e-6)
    assert found.metrics["learner/grad_norm"] == pytest.approx(expected.metrics["learner/grad_norm"], rel=1e-5)
    for (name, one), (_, other) in zip(*(next(iter(learner.gather(1 << 20))) for learner in (plain, broken)), strict=True):
        assert_close(one, other, atol=2e-5, rtol=0, msg=name)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"algorithm__advantage": {"estimator": "gdpo"}}, "algorithm.advantage: estimator gdpo: missing a required argument: 'parts'"),
        ({"algorithm__advantage": {"estimator": "rloo", "options": {"singleton": "none"}}}, "singleton"),
        ({"algorithm__loss": {"options": {"dual_clip": 0.5}}}, "dual_clip is a bound of the ratio above 1"),
        ({"algorithm__loss": {"name": "no.such:thing"}}, "no.such"),
        ({"algorithm__loss": {"name": f"{__name__}:gentle"}, "algorithm__aggregation": "token_sum"}, "leave algorithm.aggregation out"),
        ({"algorithm__loss": {"name": f"{__name__}:reinforced"}, "algorithm__importance": {"truncate": 5.0}}, None),
        ({"algorithm__loss": {"name": f"{__name__}:gentle"}, "algorithm__importance": {"truncate": 5.0}}, "algorithm.importance has no effect"),
        ({"algorithm__advantage": {"estimator": f"{__name__}:greedy"}}, "needs greedy episodes, which are played for the estimator remax only"),
        ({"algorithm__advantage": {"estimator": f"{__name__}:broken"}}, "algorithm.advantage failed on two trajectories of one token: KeyError"),
    ],
)
def test_wrong_options_are_found_when_the_learner_is_built(learner_of, settings, told):
    with pytest.raises(AgentRLError, match=told) if told else nullcontext():
        learner_of(**settings)


gentle = PolicyLoss(function=ppo, aggregation="seq_mean_token_mean")
reinforced = PolicyLoss(function=reinforce, ratio=False)
greedy = Estimator(function=grpo, needs=frozenset({"baselines"}))


def broken(inputs):
    """A user's estimator that fails."""
    return {}["nothing"]


def test_a_reference_that_runs_out_of_memory_starts_over_by_itself(learner_of):
    kl = {"where": "loss", "estimate": "k3", "coefficient": 0.1}
    plain, broken = (
        learner_of(algorithm__kl=kl, learner__tokens_per_micro_batch=60),
        learner_of(algorithm__kl=kl, learner__tokens_per_micro_batch=120),
    )
    layer, calls = broken.state.reference.model.causal.base_model.layers[0], []

    def fail_at_the_second(*_):
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")

    layer.register_forward_pre_hook(fail_at_the_second)
    batch = batch_of()
    for step in range(2):
        expected, found = (one.train(batch, step=step, progress=0.0).metrics for one in (plain, broken))
        assert found["learner/loss"] == pytest.approx(expected["learner/loss"], abs=1e-6)
        assert found["learner/kl_reference_k3"] == pytest.approx(expected["learner/kl_reference_k3"], abs=1e-6)
