"""Other engines on the same weights, prompts, lengths and cores: what the speed targets are ratios to.

Each lives in an environment of its own under `.peers/`, which `make bench-peers` makes; Shoal never imports
one. `conversation` says how they are spoken to, `rounds` how turns are taken and when a figure is refused.
"""
