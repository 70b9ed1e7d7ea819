import pytest

from agentrl.algorithm.schedules import entropy_coefficient, learning_rate


def rate(shape="constant", final_share=0.0, warmup=0.0, step=0, progress=0.0):
    return learning_rate(2.0, shape=shape, final_share=final_share, warmup=warmup, step=step, progress=progress)


def test_constant_stays_at_the_peak():
    assert [rate(step=step, progress=step / 4) for step in range(5)] == [2.0] * 5


def test_linear_falls_to_the_final_share():
    assert [rate("linear", 0.1, progress=p) for p in (0.0, 0.5, 1.0)] == pytest.approx([2.0, 1.1, 0.2])


def test_cosine_falls_to_the_final_share():
    assert [rate("cosine", 0.5, progress=p) for p in (0.0, 0.5, 1.0)] == pytest.approx([2.0, 1.5, 1.0])


def test_warm_up_in_steps_starts_with_one_share_and_ends_at_the_peak():
    assert [rate(warmup=4, step=step) for step in range(6)] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]


def test_warm_up_as_a_share_of_the_run_follows_progress():
    assert [rate(warmup=0.5, progress=p) for p in (0.0, 0.25, 0.5, 1.0)] == [0.0, 1.0, 2.0, 2.0]


def test_warm_up_and_decay_multiply():
    assert rate("linear", 0.0, warmup=4, step=1, progress=0.5) == pytest.approx(2.0 * 0.5 * 0.5)


def test_entropy_coefficient_is_constant_or_falls_to_zero():
    assert entropy_coefficient(0.01, schedule="constant", progress=0.7) == 0.01
    assert [entropy_coefficient(0.01, schedule="linear", progress=p) for p in (0.0, 0.5, 1.0, 1.2)] == pytest.approx([0.01, 0.005, 0.0, 0.0])
