"""The executor of a device: a step can begin before the last is finished, so that no device waits for it."""

from shard_worker.device.stage import DeviceStage
from shard_worker.executor import StepInputs, StepUnderWay
from shard_worker.torch_executor import TorchExecutor


class DeviceExecutor(TorchExecutor):
    """For a configuration that names a device other than the processor, or the engine `device`."""

    def begin(self, inputs: StepInputs, activations: memoryview) -> StepUnderWay:
        stage = self.stage
        assert isinstance(stage, DeviceStage), "begin before load"
        return stage.begin(inputs, activations)
