"""Pure. The kinds of identifiers, so that the type checker tells them apart.

Only their sources differ: ids are handed to the code that needs them, never drawn inside it.
"""

from typing import NewType

RequestId = NewType("RequestId", str)
BootId = NewType("BootId", str)  # new at every process start
GatewayId = NewType("GatewayId", str)  # a gateway's boot id
AckToken = NewType("AckToken", str)  # names one delivery to the broker; any process may settle it
Attempt = NewType("Attempt", int)
Epoch = NewType("Epoch", int)
StepNumber = NewType("StepNumber", int)
BlockId = NewType("BlockId", int)
Slot = NewType("Slot", int)  # a sequence's place in the workers' tables
BlockHash = NewType("BlockHash", bytes)  # 32 bytes

MAX_U32 = 0xFFFFFFFF
