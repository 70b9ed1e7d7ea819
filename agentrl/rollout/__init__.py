"""Rollout workers: episodes of a policy and an environment, from ticket to trajectory. Imports neither torch nor transformers."""
