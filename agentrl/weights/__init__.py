"""Publishing weights: snapshots of the learner and the way to the engines."""

from agentrl.weights.publisher import Published, Publisher
from agentrl.weights.snapshot import Bucket, Snapshot, save_snapshot

__all__ = ["Bucket", "Published", "Publisher", "Snapshot", "save_snapshot"]
