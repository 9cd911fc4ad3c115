"""One stage of a pipeline: a layer range on one device. It executes step k after k-1 and decides nothing."""
