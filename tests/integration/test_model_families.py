"""Every family of models that a recipe can make: engine and learner agree on it, before and after an update."""

import pytest
import torch
from learner_scene import TINY, VOCABULARY, tiny_model

from agentrl.engine.architecture import ModelConfig
from agentrl.engine.request import GenerateRequest, SamplingParams
from agentrl.engine.runner import ModelRunner
from agentrl.engine.scheduler import Scheduler
from agentrl.engine.sequence import Sequence
from agentrl.engine.weights import Weights
from agentrl.learner.policy import PolicyModel

pytestmark = pytest.mark.slow

TEMPERATURE, PROMPT, NEW = 0.7, [1, 7, 9, 11], 24


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_the_learner_finds_the_log_probs_the_engine_sampled_with(tmp_path, family, tied):
    architecture = TINY.model_copy(update={"family": family, "tie_embeddings": tied, "initializer_range": 0.3})
    model_dir = tiny_model(tmp_path, architecture)
    policy = PolicyModel.load(model_dir)
    config = ModelConfig.load(model_dir)
    assert (config.family, config.vocabulary, config.tied) == (family, VOCABULARY, tied)
    scheduler = Scheduler(ModelRunner(Weights.load(model_dir, config), slots=4, context_tokens=64), None, version="0")
    before = generated(scheduler)
    assert before.logprobs == pytest.approx(learned(policy, before), abs=1e-4)

    optimizer = torch.optim.SGD(policy.parameters(), lr=0.5)
    wanted = torch.ones(1, len(before.tokens), dtype=torch.bool).index_fill_(1, torch.tensor([0]), False)
    policy(torch.tensor([before.tokens]), wanted, torch.ones(1))[0].mean().backward()
    optimizer.step()
    assert all(parameter.grad is not None for parameter in policy.parameters())
    weights = scheduler.runner.weights
    scheduler.commit(weights.checked({name: tensor.detach() for name, tensor in policy.named_weights()}, complete=True), "1")
    after = generated(scheduler)
    assert after.logprobs == pytest.approx(learned(policy, after), abs=1e-4)
    assert max(abs(a - b) for a, b in zip(before.logprobs, learned(policy, before), strict=True)) > 0.01


def generated(scheduler):
    """A completion of PROMPT."""
    params = SamplingParams(max_new_tokens=NEW, temperature=TEMPERATURE, seed=5)
    sequence = Sequence.of(GenerateRequest(rid="a", input_ids=PROMPT, params=params, return_logprob=True), None)
    scheduler.submit(sequence)
    while scheduler.busy:
        scheduler.step()
    return sequence


def learned(policy, sequence):
    """The learner's log-probs of the output tokens."""
    wanted = torch.tensor([[False] * len(PROMPT) + [True] * NEW])
    with torch.no_grad():
        logp = policy(torch.tensor([sequence.tokens]), wanted, torch.tensor([TEMPERATURE]))[0]
    return logp[0, len(PROMPT) :].tolist()
