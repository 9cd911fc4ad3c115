"""The executor of a device: a step can begin before the last is finished, so that no device waits for it."""

from chassis.transport.registered import MemoryRange
from shard_worker.device.direct import DevicePool, flush_for
from shard_worker.device.stage import DeviceStage
from shard_worker.executor import StepInputs, StepUnderWay
from shard_worker.torch_executor import TorchExecutor


class DeviceExecutor(TorchExecutor):
    """For a configuration that names a device other than the processor, or the engine `device`."""

    def begin(
        self, inputs: StepInputs, activations: memoryview | MemoryRange, stays: bool = False
    ) -> StepUnderWay:
        return self._on_device.begin(inputs, activations, stays)

    def slots_on(self, num_bytes: int) -> DevicePool:
        flush_for(self.device)  # else nobody knew when its content can be read
        return DevicePool(num_bytes, self.device)

    def sends_from(self) -> DevicePool:
        return self._on_device.sends_from

    @property
    def _on_device(self) -> DeviceStage:
        assert isinstance(self.stage, DeviceStage), "before load"
        return self.stage
