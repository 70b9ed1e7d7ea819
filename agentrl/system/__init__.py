"""Builds, launches, supervises and shuts down the processes of a run."""

__all__: list[str] = []
