"""`python -m batcher --config FILE`."""

from batcher.config import Config
from batcher.service import Batcher
from chassis.service import main

if __name__ == "__main__":
    main("batcher", Config, Batcher)
