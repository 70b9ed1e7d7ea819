import pytest
import torch
from learner_scene import TINY, VOCABULARY, random_groups, tiny_recipe

from agentrl.learner.batch import TrainingBatch
from agentrl.learner.critic import CriticModel
from agentrl.learner.flops import ModelShape, peak_flops
from agentrl.learner.learner import Learner
from agentrl.learner.policy import PolicyModel
from agentrl.learner.ranks import Ranks

# Of the tiny model (hidden 32, MLP 48, 2 layers, 4 heads of 8, 2 of keys and values): q, o 32 x 32, k, v 32 x 16; three MLP matrices 32 x 48.
ATTENTION_WEIGHTS, MLP_WEIGHTS = 2 * 32 * 32 + 2 * 32 * 16, 3 * 32 * 48
EVERYWHERE = 2 * ATTENTION_WEIGHTS + MLP_WEIGHTS  # the last layer's MLP is computed where it is read only
BATCH = TrainingBatch.of(random_groups(), {0: 0})


def test_the_weights_a_token_meets(model_dir):
    assert TINY.hidden_size == 32
    shape = PolicyModel.load(model_dir).shape
    read = MLP_WEIGHTS + VOCABULARY * 32
    assert shape == ModelShape(everywhere=EVERYWHERE, everywhere_trained=EVERYWHERE, where_read=read, where_read_trained=read, attention=2 * 4 * 8)
    assert CriticModel.load(model_dir).shape.where_read == MLP_WEIGHTS + 32


def test_operations_by_hand():
    shape = ModelShape(everywhere=100, everywhere_trained=100, where_read=10, where_read_trained=10, attention=7)
    forward = 2 * 100 * 5 + 2 * 10 * 3 + 4 * 7 * 13  # two sequences of 2 and 3 tokens: 4 + 9 pairs
    assert shape.flops(tokens=5, read=3, pairs=13, backward=False) == forward
    assert shape.flops(tokens=5, read=3, pairs=13, backward=True) == 3 * forward  # 6 N + 12 L A T


def test_a_frozen_weights_own_gradient_costs_nothing():
    frozen = ModelShape(everywhere=100, everywhere_trained=0, where_read=10, where_read_trained=0, attention=7)
    assert frozen.flops(tokens=5, read=3, pairs=13, backward=True) == 4 * (100 * 5 + 10 * 3) + 12 * 7 * 13


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989e12),
        ("NVIDIA H100 PCIe", "bfloat16", 756e12),
        ("NVIDIA A100-SXM4-80GB", "float32", 19.5e12),
        ("NVIDIA L40S", "bfloat16", 362e12),
        ("NVIDIA GeForce GTX 970", "bfloat16", None),
    ],
)
def test_peaks_are_known_by_the_devices_name(name, dtype, peak):
    assert peak_flops(name, dtype) == peak


@pytest.mark.slow
def test_a_step_tells_its_rates_and_memory_and_no_share_of_a_peak_without_a_gpu(model_dir, tmp_path):
    learner = Learner.build(tiny_recipe(learner__ppo_epochs=2, algorithm__proximal="recompute"), model_dir, Ranks.single(), tmp_path)
    metrics = learner.train(BATCH, step=0, progress=0.0).metrics
    seconds, tokens = metrics["seconds/step"], int(BATCH.lengths_B.sum())
    assert metrics["learner/passed_tokens_per_s"] * seconds == pytest.approx(3 * tokens, rel=0.05)  # one pass before the updates, two of them
    shape, pairs, read = learner.state.policy.shape, int(BATCH.lengths_B.square().sum()), int(BATCH.loss_mask_N.sum())
    flops = shape.flops(tokens=tokens, read=read, pairs=pairs, backward=False) + 2 * shape.flops(tokens=tokens, read=read, pairs=pairs, backward=True)
    assert metrics["learner/tflops_per_s"] * seconds * 1e12 == pytest.approx(flops, rel=0.05)
    assert metrics["learner/memory_resident_mb"] > 50
    assert not {"learner/mfu", "learner/memory_allocated_mb", "learner/memory_reserved_mb"} & metrics.keys()
    assert learner.state.work.flops == 0


@pytest.mark.slow
def test_packed_trajectories_train_like_padded_ones(model_dir, tmp_path):
    settings = {"learner__tokens_per_micro_batch": 90, "critic": {}, "algorithm__advantage": {"estimator": "gae"}, "algorithm__kl": {"where": "loss"}}
    padded, packed = (
        Learner.build(tiny_recipe(**settings, learner__packing=packing), model_dir, Ranks.single(), tmp_path) for packing in ("padded", "packed")
    )
    for step in range(2):
        one, other = (learner.train(BATCH, step=step, progress=0.0).metrics for learner in (padded, packed))
        for name in ("learner/loss", "learner/grad_norm", "learner/kl_k1", "learner/kl_loss", "learner/entropy", "critic/loss", "critic/grad_norm"):
            assert other[name] == pytest.approx(one[name], rel=1e-5, abs=1e-5), name


@pytest.mark.filterwarnings("ignore")  # of torch's compiler, about itself
@pytest.mark.soak  # a C++ compiler works for half a minute
def test_compiled_layers_compute_the_same(model_dir, tmp_path):
    plain, compiled = (
        Learner.build(tiny_recipe(learner__compile=chosen), model_dir, Ranks.single(), tmp_path).train(BATCH, step=0, progress=0.0).metrics
        for chosen in (False, True)
    )
    for name in ("learner/loss", "learner/grad_norm", "learner/entropy"):
        assert compiled[name] == pytest.approx(plain[name], rel=1e-4), name


@pytest.mark.slow
def test_bfloat16_keeps_sums_in_full_precision(model_dir):
    policy = PolicyModel.load(model_dir)
    policy.shard(Ranks.single(), "bfloat16")
    ids = torch.tensor([[1, 7, 9, 11]])
    logp = policy(ids, ids > 1, torch.ones(1))[0]
    assert logp.dtype == torch.float32
    logp.sum().backward()
    assert {(p.dtype, p.grad.dtype) for p in policy.parameters()} == {(torch.float32, torch.float32)}


def test_temperatures_keep_their_digits_in_half_precision(model_dir):
    # FSDP rounds what is given to a module's forward to its dtype: 0.7 was 0.69921875
    policy = PolicyModel.load(model_dir)
    policy.shard(Ranks.single(), "bfloat16")
    ids = torch.tensor([[1, 7, 9, 11]])
    with torch.no_grad():
        exact, rounded = (policy(ids, ids > 1, torch.tensor([temperature]))[0] for temperature in (0.7, 0.69921875))
    assert not exact.equal(rounded)
