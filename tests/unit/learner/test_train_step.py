import math
from dataclasses import replace

import pytest
import torch
from learner_scene import random_groups, tiny_recipe, trajectory
from torch.testing import assert_close

from agentrl.algorithm.advantages import AdvantageInputs, estimate
from agentrl.algorithm.aggregation import Denominators, aggregate
from agentrl.algorithm.losses import LossInputs, ppo
from agentrl.algorithm.packing import pack
from agentrl.learner.batch import StepTokens, TrainingBatch
from agentrl.learner.learner import Learner
from agentrl.learner.policy import PolicyModel
from agentrl.learner.ranks import Ranks
from agentrl.wire import unpack


@pytest.fixture
def learner_of(model_dir, tmp_path):
    def build(**overrides):
        return Learner.build(tiny_recipe(**overrides), model_dir, Ranks.single(), tmp_path)

    return build


def weights(learner):
    return {name: tensor for bucket in learner.gather(1 << 20) for name, tensor in bucket}


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


BATCH = TrainingBatch.of(random_groups(), {0: 0})


@pytest.mark.slow
def test_loss_and_gradient_do_not_depend_on_how_the_batch_is_cut(learner_of):
    whole, cut = learner_of(), learner_of(learner__tokens_per_micro_batch=60)
    one, many = whole.train(BATCH, step=0, progress=0.0), cut.train(BATCH, step=0, progress=0.0)
    assert one.metrics["learner/loss"] == pytest.approx(many.metrics["learner/loss"], abs=1e-6)
    for name in ("grad_norm", "kl_k1", "kl_k3", "ess", "ratio_max", "ratio_min", "ratio_mean", "entropy", "clip_low_share"):
        assert one.metrics[f"learner/{name}"] == pytest.approx(many.metrics[f"learner/{name}"], rel=1e-5, abs=1e-6), name
    for name, tensor in weights(whole).items():
        assert_close(tensor, weights(cut)[name], atol=2e-5, rtol=0)


@pytest.mark.slow
def test_one_rank_under_fsdp_is_bit_equal_to_a_plain_loop(learner_of, model_dir):
    learner = learner_of(learner__tokens_per_micro_batch=90)
    plain = PolicyModel.load(model_dir)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, betas=(0.9, 0.999), weight_decay=0.0, fused=True)
    padded = AdvantageInputs(rewards_BT=BATCH.padded(BATCH.amounts_N), mask_BT=BATCH.padded(BATCH.loss_mask_N), groups_B=BATCH.groups_B)
    advantages_BT = estimate("grpo", padded, gamma=1.0, lam=1.0, whiten=None, options={}).advantages_BT
    tokens = StepTokens.of(BATCH, critic_mask_N=BATCH.loss_mask_N, train_mask_N=BATCH.loss_mask_N)
    tokens = replace(tokens, advantages_N=BATCH.flat(advantages_BT).float())
    counts = Denominators.of(padded.mask_BT)
    for step in range(3):
        metrics = learner.train(BATCH, step=step, progress=0.0).metrics
        total = 0.0
        for rows in pack(range(12), BATCH.lengths_B.tolist(), budget=90, ranks=1)[0]:
            micro = tokens.micro_batch(rows, torch.device("cpu"))
            logp, _ = plain(micro.token_ids_RT, micro.loss_mask_RT, micro.temperature_R)
            inputs = {"advantages_BT": micro.advantages_RT, "mask_BT": micro.train_mask_RT, "weights_BT": torch.ones_like(logp)}
            losses = ppo(LossInputs(logp_BT=logp, old_BT=micro.behaviour_RT, **inputs)).values_BT
            loss = aggregate(losses, micro.train_mask_RT, how="token_mean", denominators=counts.rows(torch.tensor(rows)))
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert (metrics["learner/loss"], metrics["learner/grad_norm"]) == (total, norm.item())
        assert same(weights(learner), dict(plain.named_weights()))


@pytest.mark.slow
def test_recomputing_activations_changes_no_bit(learner_of):
    kept, recomputed = learner_of(), learner_of(model__gradient_checkpointing=True)
    for step in range(2):
        kept.train(BATCH, step=step, progress=0.0)
        recomputed.train(BATCH, step=step, progress=0.0)
    assert same(weights(kept), weights(recomputed))


@pytest.mark.slow
def test_half_precision_computes_nearly_the_same_and_keeps_full_weights(learner_of):
    full, half = learner_of(), learner_of(model__dtype="bfloat16")
    one, other = full.train(BATCH, step=0, progress=0.0).metrics, half.train(BATCH, step=0, progress=0.0).metrics
    assert other["learner/loss"] == pytest.approx(one["learner/loss"], abs=0.02)
    assert {tensor.dtype for tensor in weights(half).values()} == {torch.bfloat16}
    assert {weight.dtype for _, weight in half.state.policy.named_weights()} == {torch.float32}


@pytest.mark.slow
def test_the_same_step_from_the_same_state_gives_the_same_bits(learner_of):
    settings = {"learner__mini_batches": 2, "learner__ppo_epochs": 2, "algorithm__entropy": {"coefficient": 0.01}}
    one, other = learner_of(**settings), learner_of(**settings)
    assert one.train(BATCH, step=3, progress=0.2).updates_done == 4
    other.train(BATCH, step=3, progress=0.2)
    assert same(weights(one), weights(other))


@pytest.mark.slow
def test_mini_batches_come_in_another_order_at_another_step(learner_of):
    one, other = learner_of(learner__mini_batches=3), learner_of(learner__mini_batches=3)
    one.train(BATCH, step=0, progress=0.0)
    other.train(BATCH, step=1, progress=0.0)
    assert not same(weights(one), weights(other))


@pytest.mark.slow
def test_training_raises_the_probability_of_what_was_rewarded(learner_of):
    right = [trajectory([1, 5, 6, 7], [0, 0, 1, 1], reward=1.0, k=k) for k in range(2)]
    wrong = [trajectory([1, 5, 8, 9], [0, 0, 1, 1], reward=0.0, k=2 + k) for k in range(2)]
    learner = learner_of(learner__learning_rate=3e-3)
    rows = torch.tensor([[1, 5, 6, 7], [1, 5, 8, 9]]), torch.tensor([[False, False, True, True]] * 2), torch.ones(2)
    with torch.no_grad():
        before = learner.state.policy(*rows)[0].sum(1)
    for step in range(5):
        logp = learner.state.policy(*rows)[0].detach()
        groups = [[*right, *wrong]]
        for row in range(4):  # on-policy: the behaviour is the learner itself
            groups[0][row].behaviour_logprobs[2:] = logp[row // 2, 2:].numpy()
        learner.train(TrainingBatch.of(groups, {0: 0}), step=step, progress=0.0)
    with torch.no_grad():
        after = learner.state.policy(*rows)[0].sum(1)
    assert after[0] > before[0] + 0.5
    assert after[1] < before[1] - 0.5


def nan_batch():
    groups = random_groups()
    groups[0][0].behaviour_logprobs[groups[0][0].loss_mask == 1] = math.nan
    return TrainingBatch.of(groups, {0: 0})


def nan_reward_batch():
    return TrainingBatch.of([[trajectory([1, 5, 6], [0, 1, 1], reward=math.nan, k=k) for k in range(2)], *random_groups()[1:]], {0: 0})


@pytest.mark.parametrize("bad", [nan_batch(), nan_reward_batch()], ids=["log-prob", "reward"])
def test_a_batch_that_is_not_finite_changes_nothing_is_counted_and_kept(learner_of, tmp_path, bad):
    learner = learner_of()
    learner.train(BATCH, step=0, progress=0.0)
    before = weights(learner)
    report = learner.train(bad, step=1, progress=0.0)
    assert (report.updates_done, report.updates_skipped, report.skipped_in_row) == (0, 1, 1)
    assert (report.metrics["learner/updates_skipped"], report.metrics["learner/updates_done"]) == (1.0, 0.0)
    assert same(before, weights(learner))
    kept = unpack((tmp_path / "skipped" / "step_00000001.msgpack").read_bytes())
    assert len(kept) == len(bad.trajectories)
    assert not any(math.isnan(value) for name, value in report.metrics.items() if not name.startswith("learner/advantage"))
    assert learner.train(BATCH, step=2, progress=0.0).skipped_in_row == 0


@pytest.mark.slow
def test_of_skipped_batches_the_newest_ten_are_kept(learner_of, tmp_path):
    learner = learner_of()
    for step in range(12):
        learner.train(nan_batch(), step=step, progress=0.0)
    assert sorted(path.name for path in (tmp_path / "skipped").iterdir()) == [f"step_{step:08d}.msgpack" for step in range(2, 12)]


@pytest.mark.slow
def test_after_a_skipped_batch_training_goes_on_as_if_it_had_not_been(learner_of):
    one, other = learner_of(), learner_of()
    one.train(nan_batch(), step=0, progress=0.0)
    assert one.train(BATCH, step=0, progress=0.0).metrics["learner/loss"] == other.train(BATCH, step=0, progress=0.0).metrics["learner/loss"]
    assert same(weights(one), weights(other))


@pytest.mark.slow
def test_rows_without_gradient_are_not_computed_and_stay_in_the_denominator(learner_of):
    useful = random_groups(groups=1)
    useless = [[trajectory([1, 5, 6], [0, 1, 1], reward=1.0, task=9, k=k) for k in range(2)]]
    batch = TrainingBatch.of(useful + useless, {0: 0})
    spared, computed = learner_of(), learner_of(algorithm__entropy={"coefficient": 1e-30})
    one, other = spared.train(batch, step=0, progress=0.0), computed.train(batch, step=0, progress=0.0)
    assert one.metrics["learner/loss"] == pytest.approx(other.metrics["learner/loss"], abs=1e-7)
    assert one.metrics["learner/grad_norm"] == pytest.approx(other.metrics["learner/grad_norm"], rel=1e-5)
    alone = learner_of().train(TrainingBatch.of(useful, {0: 0}), step=0, progress=0.0)
    share = batch.count(batch.loss_mask_N)[:4].sum() / batch.loss_mask_N.sum()
    assert one.metrics["learner/loss"] == pytest.approx(alone.metrics["learner/loss"] * share.item(), rel=1e-5)


def test_a_batch_without_any_gradient_is_an_update_of_nothing(learner_of):
    batch = TrainingBatch.of([[trajectory([1, 5], [0, 1], reward=1.0, k=k) for k in range(2)]], {0: 0})
    learner = learner_of()
    before = weights(learner)
    report = learner.train(batch, step=0, progress=0.0)
    assert (report.updates_done, report.metrics["learner/grad_norm"]) == (1, 0.0)
    assert same(before, weights(learner))


def test_old_tokens_are_masked_and_their_siblings_keep_the_baseline(learner_of):
    young = [trajectory([1, 5, 6], [0, 1, 1], reward=1.0, k=0, version=5), trajectory([1, 5, 7], [0, 1, 1], reward=0.0, k=1, version=5)]
    old = [trajectory([1, 5, 8], [0, 1, 1], reward=1.0, k=2, version=1)]
    report = learner_of(algorithm__max_token_age=3).train(TrainingBatch.of([young + old], {5: 0, 1: 4}), step=5, progress=0.0)
    assert report.metrics["learner/train_mask_share"] == pytest.approx(4 / 6)
    assert report.metrics["learner/tokens"] == 4
    assert report.metrics["learner/advantage_mean"] == pytest.approx(0.0, abs=1e-6)


def test_on_policy_log_probs_have_ratio_one_and_no_divergence(learner_of):
    learner = learner_of()
    with torch.no_grad():
        groups = random_groups()
        for row in (row for group in groups for row in group):
            ids, mask = torch.from_numpy(row.token_ids).long()[None], torch.from_numpy(row.loss_mask)[None] == 1
            row.behaviour_logprobs[:] = learner.state.policy(ids, mask, torch.ones(1))[0][0].numpy()
    metrics = learner.train(TrainingBatch.of(groups, {0: 0}), step=0, progress=0.0).metrics
    assert metrics["learner/ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["learner/kl_k1"] == pytest.approx(0.0, abs=1e-5)
    assert metrics["learner/ess"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["learner/clip_low_share"] == metrics["learner/clip_high_share"] == 0.0


def test_decoupled_with_several_updates_measures_from_the_steps_start(learner_of):
    settings = {"algorithm__proximal": "recompute", "learner__learning_rate": 0.0}
    one = learner_of(**settings).train(BATCH, step=0, progress=0.0).metrics
    two = learner_of(**settings, learner__ppo_epochs=2).train(BATCH, step=0, progress=0.0).metrics
    # at learning rate 0 the learner stays the proximal policy: every pass has the same loss, nothing is clipped
    assert two["learner/loss"] == pytest.approx(one["learner/loss"], abs=1e-6)
    assert two["learner/clip_low_share"] == two["learner/clip_high_share"] == 0.0
    assert two["learner/importance_mean"] == pytest.approx(one["learner/importance_mean"], rel=1e-5)


def test_gathered_weights_are_copies_in_buckets_of_at_least_the_asked_size(learner_of):
    learner = learner_of()
    buckets = list(learner.gather(8000))
    sizes = [sum(tensor.nbytes for _, tensor in bucket) for bucket in buckets]
    assert all(size >= 8000 for size in sizes[:-1])
    assert [name for bucket in buckets for name, _ in bucket] == [name for name, _ in learner.state.policy.named_weights()]
    kept = {name: tensor.clone() for bucket in buckets for name, tensor in bucket}
    learner.train(BATCH, step=0, progress=0.0)
    assert all(torch.equal(tensor, kept[name]) for bucket in buckets for name, tensor in bucket)


def test_schedules_reach_the_update(learner_of):
    learner = learner_of(learner__schedule={"shape": "linear", "warmup": 2}, algorithm__entropy={"coefficient": 0.1, "schedule": "linear"})
    metrics = learner.train(BATCH, step=0, progress=0.5).metrics
    assert metrics["learner/learning_rate"] == pytest.approx(1e-2 * 0.5 * 0.5)
    assert metrics["learner/entropy_coefficient"] == pytest.approx(0.05)
    assert learner.state.optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 * 0.5 * 0.5)
