"""Measurements: workloads against Shoal and against a bare driver, as ratios of one run."""
