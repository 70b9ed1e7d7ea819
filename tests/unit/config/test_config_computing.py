import pytest
from learner_scene import tiny_recipe
from pydantic import ValidationError

from agentrl.config.attentions import packs
from agentrl.config.cautions import cautions

GPU = {"learner__device": "cuda", "model__dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"learner__ranks": 6, "learner__replicate": 4}, "must be a multiple of learner.replicate"),
        ({"learner__cpu_offload": True}, "learner.cpu_offload does nothing with learner.device cpu"),
        ({"model__attention": "varlen"}, "model.attention varlen runs on a GPU only"),
        ({"model__attention": "flash_attention_2", "learner__device": "cuda"}, "computes in half precision only"),
        ({"profile": {"steps": [3, 3]}}, "holds no step"),
        ({"profile": {"steps": [10, 12]}}, "begins at 10, and the run has the steps 0 to 9"),
        ({"profile": {"steps": [0, 1], "ranks": [0, 1]}}, "are not among the learner's, 0 to 0"),
        ({"profile": {"steps": [0, 1], "tool": "memory"}}, "memory looks at a GPU, and learner.device is cpu: set profile.tool=torch"),
        ({"profile": {"steps": [0, 1], "tool": "nsys"}}, "nsys looks at a GPU"),
        ({"profile": {"steps": [0, 1], "tool": "nsys", "roles": ["engine"]}, **GPU}, "engines write torch traces"),
        ({"profile": {"steps": [0, 1], "ranks": [1], "roles": ["engine"]}, "learner__ranks": 2}, "leaves the learner out"),
        ({"profile": {"steps": [0, 1], "engine_passes": 7}}, "profile.roles leaves them out"),
    ],
)
def test_what_would_do_nothing_is_refused(settings, told):
    with pytest.raises(ValidationError, match=told):
        tiny_recipe(**settings)


def test_what_a_gpu_can_do_is_taken():
    tiny_recipe(**GPU, model__attention="varlen", learner__cpu_offload=True, profile={"steps": [0, 2], "tool": "nsys"})
    tiny_recipe(learner__ranks=4, learner__replicate=2, learner__packing="packed")


def test_trajectories_are_packed_where_the_attention_keeps_them_apart_for_nothing():
    assert [packs("auto", attention) for attention in ("sdpa", "flash_attention_2", "varlen")] == [False, True, True]
    assert packs("packed", "sdpa")
    assert not packs("padded", "varlen")


def test_packing_without_an_attention_made_for_it_comes_with_a_caution():
    [told] = cautions(tiny_recipe(learner__packing="packed"))
    assert "Slower than padded" in told
