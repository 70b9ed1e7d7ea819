import shutil

import pytest
import torch
from learner_models_scene import full_recipe, play

from agentrl.buffer_api import JournalMark
from agentrl.errors import CheckpointError
from agentrl.learner import checkpoint
from agentrl.learner.learner import Learner
from agentrl.learner.ranks import Ranks

pytestmark = pytest.mark.slow

ADAPTIVE = {"where": "reward", "controller": "adaptive", "coefficient": 0.2, "target": 0.1, "horizon": 100}


@pytest.fixture
def learner_of(model_dir, tmp_path):
    def build(**overrides):
        return Learner.build(full_recipe(**{"model__lora": None} | overrides), model_dir, Ranks.single(), tmp_path)

    return build


def save(learner, root, step=2):
    return checkpoint.commit(checkpoint.write(learner, root, step, 0), JournalMark(offset=0, consumed=(), frontier=0, step=step))


def test_training_with_a_critic_goes_on_from_a_checkpoint_with_the_same_bits(learner_of, tmp_path):
    learner = learner_of()
    play(learner, range(2))
    manifest = save(learner, tmp_path / "checkpoints")
    expected = play(learner, range(2, 5))
    fresh = learner_of(seed=3)
    checkpoint.load(fresh, manifest)
    assert play(fresh, range(2, 5)) == expected
    weights = dict(learner.state.critic.named_weights())
    assert all(weight.to_local().equal(weights[name].to_local()) for name, weight in fresh.state.critic.named_weights())


def test_controllers_are_kept(learner_of, tmp_path):
    learner = learner_of(algorithm__kl=ADAPTIVE)
    assert (learner.state.controllers.kl_coefficient, learner.state.controllers.learning_rate_scale) == (0.2, 1.0)
    learner.state.controllers.kl_coefficient, learner.state.controllers.learning_rate_scale = 1 / 3, 0.1
    manifest = save(learner, tmp_path / "checkpoints")
    fresh = learner_of(algorithm__kl=ADAPTIVE)
    checkpoint.load(fresh, manifest)
    assert (fresh.state.controllers.kl_coefficient, fresh.state.controllers.learning_rate_scale) == (1 / 3, 0.1)
    fixed = learner_of()
    checkpoint.load(fixed, manifest)
    assert (fixed.state.controllers.kl_coefficient, fixed.state.controllers.learning_rate_scale) == (None, 0.1)


def test_a_checkpoint_of_a_fixed_coefficient_leaves_an_adaptive_one_at_its_beginning(learner_of, tmp_path):
    manifest = save(learner_of(), tmp_path / "checkpoints")
    fresh = learner_of(algorithm__kl=ADAPTIVE)
    checkpoint.load(fresh, manifest)
    assert fresh.state.controllers.kl_coefficient == 0.2


def test_a_checkpoint_without_a_critic_is_refused_where_one_is_trained_and_one_with_a_critic_is_read_without(learner_of, tmp_path):
    without = {"critic": None, "algorithm__advantage": {"estimator": "grpo"}}
    grpo, ppo = learner_of(**without), learner_of()
    play(ppo, range(2))
    checkpoint.load(grpo, save(ppo, tmp_path / "with"))
    assert _same(grpo, ppo)
    with pytest.raises(CheckpointError, match="has no critic, and the recipe trains one"):
        checkpoint.load(ppo, save(grpo, tmp_path / "without"))


def test_a_checkpoint_of_before_there_were_controllers_loads(learner_of, tmp_path):
    learner = learner_of()
    play(learner, range(2))
    pending = checkpoint.write(learner, tmp_path / "checkpoints", 2, 0)
    shutil.rmtree(pending.temporary / "state")
    state = {name: entry for name, entry in checkpoint._state(learner).items() if name != "controllers"}
    checkpoint.save_state(state, checkpoint_id=pending.temporary / "state")
    manifest = checkpoint.commit(pending, JournalMark(offset=0, consumed=(), frontier=0, step=2))
    fresh = learner_of(seed=3)
    checkpoint.load(fresh, manifest)
    assert fresh.state.controllers.learning_rate_scale == 1.0
    assert _same(fresh, learner)


def _same(one, other):
    weights = dict(other.state.policy.named_weights())
    return all(torch.equal(weight.to_local(), weights[name].to_local()) for name, weight in one.state.policy.named_weights())
