"""What an operator can set on an autoscaler that only tells (`python -m shoal.autoscale`)."""

from dataclasses import dataclass

from shoal.autoscale.policy import Rules


@dataclass(frozen=True, slots=True)
class Config:
    model: str = ""  # empty: the first one registered
    pipelines_min: int = 1
    pipelines_max: int = 8
    gateways_min: int = 1
    gateways_max: int = 8
    gateway_streams: int = 1024  # open at once, that a gateway is meant to carry
    ttft_objective_ms: int = 2000
    down_after_s: float = 0.0  # for how long less must have been enough; 0: ten times what a start takes

    def __post_init__(self) -> None:
        self.rules()

    def rules(self) -> Rules:
        """Raises ValueError."""
        return Rules(
            pipelines_min=self.pipelines_min,
            pipelines_max=self.pipelines_max,
            gateways_min=self.gateways_min,
            gateways_max=self.gateways_max,
            gateway_streams=self.gateway_streams,
            ttft_objective_ms=self.ttft_objective_ms,
            down_after_s=self.down_after_s or None,
        )
