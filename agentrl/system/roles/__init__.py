"""One program per role: each composes the packages below it, and is all that a Ray actor or a child process runs."""

__all__: list[str] = []
