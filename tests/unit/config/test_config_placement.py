"""Engines and learner ranks that share GPUs: what is refused, and what is booked for them."""

import pytest
from pydantic import ValidationError

from agentrl.config.recipe import Recipe
from agentrl.system.booking import booked, bundles, pair
from agentrl.system.gpus import GPUs
from agentrl.system.process import Role

BASE = {
    "name": "x",
    "run": {"steps": 1},
    "model": {"path": "m"},
    "tasks": {"train": [{"path": "t"}]},
    "env": {"factory": "a:B"},
    "engine": {"device": "cuda", "replicas": 2},
    "learner": {"device": "cuda", "ranks": 2},
    "resources": {"colocate": True, "engine_cpus": 2, "learner_cpus": 4},
}


def recipe(**sections):
    return Recipe.model_validate(BASE | {name: BASE.get(name, {}) | keys for name, keys in sections.items()})


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"engine": {"replicas": 3}}, "as many engines as ranks, and engine.replicas is 3, learner.ranks 2"),
        (
            {"engine": {"kind": "sglang", "urls": ["http://a:1"], "replicas": 1}, "learner": {"ranks": 1}, "resources": {"engine_cpus": 0}},
            "leave engine.urls out",
        ),
        ({"engine": {"kind": "sglang", "tensor_parallel": 2}}, "an engine on one GPU, and engine.tensor_parallel is 2"),
        ({"engine": {"device": "cpu"}}, "both on one device, and engine.device is cpu, learner.device cuda"),
        ({"resources": {"engine_gpus": 1}}, "learner_gpus 0.5, or 0, which means the same"),
        ({"resources": {"learner_gpus": 0.5}, "engine": {"device": "cpu"}, "learner": {"device": "cpu"}}, "learner_gpus 0: nothing is on a GPU"),
        ({"weights": {"backend": "nccl"}}, "another backend than nccl"),
    ],
)
def test_colocation_that_does_not_fit_is_refused_with_what_it_needs(sections, told):
    with pytest.raises(ValidationError, match=f"resources.colocate needs .*{told}"):
        recipe(**sections)


@pytest.mark.parametrize("shares", [{}, {"engine_gpus": 0.5}, {"engine_gpus": 0.5, "learner_gpus": 0.5}])
def test_an_engine_and_a_rank_book_one_bundle_with_one_gpu(shares):
    found = recipe(resources=shares)
    assert (booked(found, Role.ENGINE), booked(found, Role.LEARNER), booked(found, Role.WORKER)) == ((2, 0.5), (4, 0.5), (0, 0))
    assert [(bundle.name, bundle.processes, bundle.resources) for bundle in bundles(found)] == [
        ("pair-0", ("engine-0", "learner-0"), {"CPU": 6, "GPU": 1}),
        ("pair-1", ("engine-1", "learner-1"), {"CPU": 6, "GPU": 1}),
    ]
    gpus = GPUs(["0", "1"])
    assert [gpus.take(pair(found, role, index), 1.0) for role in (Role.ENGINE, Role.LEARNER) for index in (0, 1)] == [("0",), ("1",)] * 2


def test_disaggregated_processes_book_a_bundle_each():
    found = recipe(resources={"colocate": False, "engine_gpus": 1, "learner_gpus": 2, "worker_cpus": 1})
    assert [(bundle.name, bundle.resources) for bundle in bundles(found)] == [
        ("engine-0", {"CPU": 2, "GPU": 1}),
        ("engine-1", {"CPU": 2, "GPU": 1}),
        ("learner-0", {"CPU": 4, "GPU": 2}),
        ("learner-1", {"CPU": 4, "GPU": 2}),
        ("worker-0", {"CPU": 1}),
    ]
    assert pair(found, Role.ENGINE, 0) == ""
