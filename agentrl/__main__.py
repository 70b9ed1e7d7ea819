"""`python -m agentrl`: the same as the command `agentrl`."""

from agentrl.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
