"""Tasks: where they come from, in which order they are issued, and a tokenizer made on the spot. Imports neither torch nor transformers."""

__all__: list[str] = []
