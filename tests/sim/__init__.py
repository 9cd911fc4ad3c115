"""The whole of Shoal above its seams, in one thread, on a virtual clock, under seeded faults."""
