"""A process that is a Ray actor, and how its death is told."""

import pytest
import trio

from agentrl.errors import ProcessDied
from agentrl.system.process import ProcessSpec, Role

pytestmark = pytest.mark.soak  # starts Ray


def test_an_actor_that_dies_while_it_starts_is_a_process_that_died_whichever_of_its_calls_ends_first():
    ray = pytest.importorskip("ray")
    from agentrl.system.ray_launcher import RayProcess, RoleActor

    @ray.remote
    def ends_later():
        return {"kind": "EngineError", "message": "no model"}

    ray.init(address="local", include_dashboard=False, log_to_driver=False, num_cpus=1)
    try:
        actor = RoleActor.remote()
        ray.kill(actor, no_restart=True)
        spec = ProcessSpec(role=Role.ENGINE, index=0, incarnation=1, run_dir="/run", recipe={})
        process = RayProcess(spec=spec, actor=actor, running=ends_later.remote())  # its worker is yet to be started
        with pytest.raises(ProcessDied, match="engine-0 ended before it was ready: EngineError: no model"):
            trio.run(process.ready)
    finally:
        ray.shutdown()
