"""The KServe SDK's two clients."""

import asyncio
import sys

from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest
from kserve.inference_client import RESTConfig

MODEL = "fake"


def request(prompt: str) -> InferRequest:
    inputs = [
        InferInput("text_input", [1], "BYTES", [prompt]),
        InferInput("max_tokens", [1], "INT32", [12]),
        InferInput("temperature", [1], "FP32", [0.0]),
        InferInput("ignore_eos", [1], "BOOL", [True]),
    ]
    return InferRequest(model_name=MODEL, infer_inputs=inputs, request_id="k1", parameters={"priority": 1})


def text_of(answer: object) -> str:
    (first,) = [output for output in answer.outputs if output.name == "text_output"]
    (text,) = first.as_numpy().flatten()
    return text.decode() if isinstance(text, bytes) else str(text)


async def main(grpc_address: str, http_address: str) -> None:
    async with InferenceGRPCClient(grpc_address) as client:
        assert await client.is_server_live() and await client.is_server_ready()
        assert await client.is_model_ready(MODEL) and not await client.is_model_ready("nonsense")
        answer = await client.infer(request("One"))
        assert answer.id == "k1" and answer.model_name == MODEL
        said = text_of(answer)
        assert len(said) > 0
    base = f"http://{http_address}"
    async with InferenceRESTClient(RESTConfig(protocol="v2")) as client:
        assert await client.is_server_live(base) and await client.is_server_ready(base)
        assert await client.is_model_ready(base, MODEL)
        answer = await client.infer(base, request("One"), MODEL)
        assert (text_of(answer), answer.id) == (said, "k1")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
