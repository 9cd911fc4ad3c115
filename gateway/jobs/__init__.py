"""Jobs of the bus: taken in, run as the batch class, answered once (JOBS.md)."""
