"""`python -m shoal.autoscale`: tells how many pipelines and gateways a model should have."""

from chassis.ports import Ports
from chassis.service import main
from shoal.autoscale.config import Config
from shoal.autoscale.service import Autoscaler


def build(config: Config, ports: Ports) -> Autoscaler:
    return Autoscaler(config, ports)


if __name__ == "__main__":
    main("autoscale", Config, build)
