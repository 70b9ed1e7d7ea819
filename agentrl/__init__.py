"""agentrl: asynchronous off-policy reinforcement learning for language-model agents that use tools."""

__version__ = "0.1.0"
