"""`python -m gateway --config FILE`: one gateway against a running bus."""

from chassis.service import main
from gateway.config import Config
from gateway.service import Gateway

if __name__ == "__main__":
    main("gateway", Config, Gateway)
