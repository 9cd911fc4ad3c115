"""How many pipelines and gateways a model should have, and who sees to it: a pure policy with thin shells."""
