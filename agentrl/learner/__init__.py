"""The learner: FSDP2 ranks that turn batches of trajectories into optimizer updates."""
