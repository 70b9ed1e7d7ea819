"""The checks of `gpu_check.py`, one module each: `check(shape, device)` answers its numbers with a verdict."""
