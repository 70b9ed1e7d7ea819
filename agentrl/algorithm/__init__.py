"""Pure functions of tensors: no configuration, no device, no logging.

Dimensions: B trajectories, T tokens of the longest one, N tokens (or anything flat). Every denominator is an argument.
"""
