from functools import partial

import torch
from torch import tensor
from torch.testing import assert_close

from agentrl.learner.logprob import token_logprobs


def test_logprob_and_entropy_by_hand():
    # logits ln 1, ln 2, ln 5 at temperature 1: p = 1/8, 2/8, 5/8
    logp, entropy = token_logprobs(tensor([[1.0]]), tensor([[1.0], [2.0], [5.0]]).log(), tensor([1]), tensor([1.0]))
    p = tensor([1 / 8, 2 / 8, 5 / 8])
    assert_close(logp, tensor([0.25]).log())
    assert_close(entropy, -(p * p.log()).sum()[None])


def test_the_sum_of_squared_probabilities_by_hand_in_one_chunk_and_in_many():
    # p = 1/8, 2/8, 5/8: 1/64 + 4/64 + 25/64; three equal logits: 3 / 9
    hidden, weight = tensor([[1.0], [0.0]], requires_grad=True), tensor([[1.0], [2.0], [5.0]]).log()
    for elements in (100, 1):
        logp, _, squared = token_logprobs(hidden, weight, tensor([1, 1]), tensor([1.0, 1.0]), sum_pi_squared=True, chunk_elements=elements)
        assert_close(squared, tensor([30 / 64, 1 / 3]))
        assert not squared.requires_grad
        assert logp.requires_grad


def test_a_frozen_output_layer_gets_no_gradient_and_the_states_the_same():
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(5, 3, generator=generator, requires_grad=True), torch.randn(7, 3, generator=generator)
    grads = []
    for frozen in (True, False):
        output = weight.clone().requires_grad_(not frozen)
        logp, _ = token_logprobs(hidden, output, torch.arange(5), torch.ones(5))
        logp.sum().backward()
        grads.append(hidden.grad)
        assert (output.grad is None) == frozen
        hidden.grad = None
    assert grads[0].equal(grads[1])


def test_temperature_divides_the_logits():
    weight = tensor([[1.0], [2.0], [4.0]]).log()
    logp, _ = token_logprobs(tensor([[1.0], [1.0]]), weight, tensor([2, 2]), tensor([0.5, 2.0]))
    assert_close(logp.exp(), tensor([16 / 21, 2 / (1 + 2**0.5 + 2)]))


def test_values_and_gradients_are_those_of_log_softmax_in_one_chunk_and_in_many():
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(13, 6, generator=generator), torch.randn(11, 6, generator=generator)
    targets = torch.randint(0, 11, (13,), generator=generator)
    temperature = torch.rand(13, generator=generator) + 0.5
    mix_logp, mix_entropy = torch.randn(2, 13, generator=generator)

    def gradients(function):
        inputs = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        logp, entropy = function(*inputs)
        ((logp * mix_logp).sum() + (entropy * mix_entropy).sum()).backward()
        return logp.detach(), entropy.detach(), inputs[0].grad, inputs[1].grad

    def plain(hidden, weight):
        logp = (hidden @ weight.T / temperature[:, None]).log_softmax(-1)
        return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)

    expected = gradients(plain)
    for elements in (1 << 20, 44, 1):
        ours = gradients(partial(token_logprobs, targets_N=targets, temperature_N=temperature, chunk_elements=elements))
        for one, other, tolerance in zip(ours, expected, (1e-6, 1e-6, 1e-5, 1e-5), strict=True):
            assert_close(one, other, atol=tolerance, rtol=tolerance)


def test_gradients_of_either_answer_alone_are_those_of_log_softmax():
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(7, 6, generator=generator), torch.randn(11, 6, generator=generator)
    targets = torch.randint(0, 11, (7,), generator=generator)
    for which in (0, 1):
        inputs, plain = ([hidden.clone().requires_grad_(), weight.clone().requires_grad_()] for _ in range(2))
        token_logprobs(*inputs, targets, torch.ones(7))[which].sum().backward()
        logp = (plain[0] @ plain[1].T).log_softmax(-1)
        (logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1))[which].sum().backward()
        for one, other in zip(inputs, plain, strict=True):
            assert_close(one.grad, other.grad, atol=1e-5, rtol=1e-5)


def test_inputs_in_half_precision_have_answers_in_full_and_gradients_near_those_of_full():
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(64, 16, generator=generator), 0.3 * torch.randn(50, 16, generator=generator)
    targets = torch.randint(0, 50, (64,), generator=generator)
    answers = []
    for dtype in (torch.bfloat16, torch.float32):
        inputs = [tensor.bfloat16().to(dtype).requires_grad_() for tensor in (hidden, weight)]
        logp, entropy = token_logprobs(*inputs, targets, torch.ones(64), chunk_elements=500)
        (logp.sum() + entropy.sum()).backward()
        assert (logp.dtype, inputs[1].grad.dtype) == (torch.float32, dtype)
        answers.append([logp.detach(), *(tensor.grad.float() for tensor in inputs)])
    for half, full in zip(*answers, strict=True):
        assert (half - full).norm() < 0.01 * full.norm()


def test_no_tokens_at_all_have_zero_gradients():
    hidden, weight = torch.zeros(0, 3, requires_grad=True), torch.ones(5, 3, requires_grad=True)
    logp, entropy = token_logprobs(hidden, weight, torch.zeros(0, dtype=torch.int64), torch.zeros(0))
    (logp.sum() + entropy.sum()).backward()
    assert weight.grad.abs().sum().item() == 0.0
