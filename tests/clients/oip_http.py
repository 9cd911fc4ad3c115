"""NVIDIA's tritonclient over HTTP, and the generate endpoints with plain HTTP."""

import json
import sys
import urllib.error
import urllib.request

import numpy as np
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

MODEL = "fake"


def texts(name: str, *values: str, binary: bool = True) -> triton.InferInput:
    made = triton.InferInput(name, [len(values)], "BYTES")
    made.set_data_from_numpy(np.array([v.encode() for v in values], dtype=object), binary_data=binary)
    return made


def number(name: str, datatype: str, value: object, dtype: type, binary: bool = True) -> triton.InferInput:
    made = triton.InferInput(name, [1], datatype)
    made.set_data_from_numpy(np.array([value], dtype=dtype), binary_data=binary)
    return made


def asked(prompt: str, count: int, binary: bool = True) -> list[triton.InferInput]:
    return [
        texts("text_input", prompt, binary=binary),
        number("max_tokens", "INT32", count, np.int32, binary),
        number("temperature", "FP32", 0.0, np.float32, binary),
        number("ignore_eos", "BOOL", True, np.bool_, binary),
    ]


def refused(call, status: str, *words: str) -> None:
    try:
        call()
    except InferenceServerException as error:
        assert str(error.status()) == status, (error.status(), error)
        assert all(word in error.message() for word in words), error
    else:
        raise AssertionError(f"not refused: {words}")


def infer(client: triton.InferenceServerClient) -> str:
    first = client.infer(MODEL, asked("One", 12), request_id="r1", priority=1, timeout=5_000_000)
    said = first.as_numpy("text_output")[0].decode()
    assert first.get_response()["id"] == "r1" and first.get_response()["model_version"] == "1"
    assert first.as_numpy("finish_reason")[0] == b"length"
    plain = [triton.InferRequestedOutput(n, binary_data=False) for n in ("text_output", "output_ids")]
    again = client.infer(MODEL, asked("One", 12, binary=False), outputs=plain)
    assert again.as_numpy("text_output")[0] in (said, said.encode())
    assert again.as_numpy("output_ids").shape == (1, 12)
    several = client.async_infer(MODEL, [texts("text_input", "One", "Two"), *asked("", 12)[1:]])
    assert several.get_result().as_numpy("text_output").shape == (2,)
    refused(lambda: client.infer("nonsense", asked("One", 1)), "404", "nonsense")
    refused(lambda: client.infer(MODEL, asked("One", 1), model_version="3"), "404", "3")
    refused(lambda: client.infer(MODEL, asked("One", 0)), "400", "max_tokens", "1")
    refused(lambda: client.infer(MODEL, [*asked("One", 1), texts("nope", "x")]), "400", "nope")
    return said


def told_of(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready(MODEL)
    assert not client.is_model_ready("nonsense") and not client.is_model_ready(MODEL, "2")
    assert client.get_server_metadata()["name"] == "shoal"
    model = client.get_model_metadata(MODEL)
    assert model["versions"] == ["1"] and model["inputs"][0]["name"] == "text_input"
    config = client.get_model_config(MODEL, "1")
    assert (
        config["model_transaction_policy"]["decoupled"] and config["input"][0]["data_type"] == "TYPE_STRING"
    )
    refused(lambda: client.get_model_config("nonsense"), "404", "nonsense")
    (of_model,) = client.get_inference_statistics(MODEL)["model_stats"]
    assert of_model["inference_count"] >= of_model["execution_count"] > 0
    assert client.get_inference_statistics()["model_stats"][0]["name"] == MODEL
    assert client.get_system_shared_memory_status() == []
    refused(lambda: client.register_system_shared_memory("a", "/b", 8), "501", "shared memory")
    assert client.get_trace_settings() == {}


def post(base: str, path: str, body: object) -> tuple[int, str]:
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(base + path, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def generate(base: str, said: str) -> None:
    path = f"/v2/models/{MODEL}/generate"
    options = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
    status, body = post(base, path, {"text_input": "One", "id": "g", "parameters": options})
    answer = json.loads(body)
    assert (status, answer["text_output"], answer["id"], answer["finish_reason"]) == (
        200,
        said,
        "g",
        "length",
    )
    flat = {"text_input": "One", "stop_words": "", "bad_words": "", "stream": False, **options}
    assert json.loads(post(base, f"/v2/models/{MODEL}/versions/1/generate", flat)[1])["text_output"] == said
    status, body = post(base, f"{path}_stream", {"text_input": "One", "parameters": options})
    events = [json.loads(line.removeprefix("data: ")) for line in body.split("\n\n") if line]
    assert status == 200 and "".join(event["text_output"] for event in events) == said and len(events) > 1
    assert [event["triton_final_response"] for event in events] == [False] * (len(events) - 1) + [True]
    status, body = post(base, f"{path}_stream", {"text_input": "One", "temperature": 9})
    assert status == 400 and "temperature" in json.loads(body)["error"]
    for bad in ([], {"text_input": 1}, {"text_input": "x", "parameters": 3}, {}):
        status, body = post(base, path, bad)
        assert status == 400 and json.loads(body)["error"], bad


def main(address: str) -> None:
    with triton.InferenceServerClient(address, concurrency=2) as client:
        said = infer(client)
        told_of(client)
        generate(f"http://{address}", said)
        (entry,) = client.get_model_repository_index()
        assert (entry["name"], entry["state"]) == (MODEL, "READY")
        client.load_model(MODEL)
        refused(lambda: client.unload_model("nonsense"), "404", "nonsense")


if __name__ == "__main__":
    main(sys.argv[1])
