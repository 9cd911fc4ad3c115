"""NVIDIA's tritonclient over gRPC, as its users call it. Writes JSON at the end."""

import asyncio
import json
import queue
import sys

import numpy as np
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.utils import InferenceServerException

MODEL = "fake"


def texts(name: str, *values: str, shape: tuple[int, ...] | None = None) -> triton.InferInput:
    array = np.array([v.encode() for v in values], dtype=object).reshape(shape or (len(values),))
    made = triton.InferInput(name, list(array.shape), "BYTES")
    made.set_data_from_numpy(array)
    return made


def value(name: str, datatype: str, number: object, dtype: type) -> triton.InferInput:
    made = triton.InferInput(name, [1], datatype)
    made.set_data_from_numpy(np.array([number], dtype=dtype))
    return made


def trtllm(prompt: str, count: int, stream: bool = False) -> list[triton.InferInput]:
    return [
        texts("text_input", prompt, shape=(1, 1)),
        value("max_tokens", "INT32", count, np.int32),
        value("temperature", "FP32", 0.0, np.float32),
        value("ignore_eos", "BOOL", True, np.bool_),
        value("stream", "BOOL", stream, np.bool_),
    ]


def vllm(prompt: str, count: int, stream: bool = False) -> list[triton.InferInput]:
    sampling = {"max_tokens": str(count), "temperature": "0", "ignore_eos": True}
    return [
        texts("text_input", prompt),
        value("stream", "BOOL", stream, np.bool_),
        texts("sampling_parameters", json.dumps(sampling)),
        value("exclude_input_in_output", "BOOL", True, np.bool_),
    ]


def text_of(result: triton.InferResult) -> str:
    return b"".join(result.as_numpy("text_output").flatten()).decode()


def refused(call, code: str, *words: str) -> None:
    try:
        call()
    except InferenceServerException as error:
        assert error.status() == f"StatusCode.{code}", error
        assert all(word in error.message() for word in words), error
    else:
        raise AssertionError(f"not refused: {words}")


def told_of(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live() and client.is_server_ready()
    assert client.is_model_ready(MODEL) and client.is_model_ready(MODEL, "1")
    assert not client.is_model_ready(MODEL, "2") and not client.is_model_ready("nonsense")
    server = client.get_server_metadata()
    assert server.name == "shoal" and {"statistics", "binary_tensor_data"} <= set(server.extensions)
    model = client.get_model_metadata(MODEL)
    assert list(model.versions) == ["1"] and model.platform == "shoal"
    assert {"text_input", "max_tokens", "sampling_parameters"} <= {t.name for t in model.inputs}
    assert {"text_output", "finish_reason"} <= {t.name for t in model.outputs}
    config = client.get_model_config(MODEL).config
    assert config.model_transaction_policy.decoupled and config.max_batch_size == 0
    assert config.dynamic_batching.priority_levels == 10
    assert config.input[0].name == "text_input" and not config.input[0].optional
    refused(lambda: client.get_model_metadata("nonsense"), "NOT_FOUND", "nonsense")
    refused(lambda: client.get_model_config(MODEL, "7"), "NOT_FOUND", "7")
    assert len(client.get_system_shared_memory_status().regions) == 0
    client.unregister_cuda_shared_memory()
    refused(lambda: client.register_system_shared_memory("a", "/b", 8), "UNIMPLEMENTED", "shared memory")
    assert not client.get_log_settings().settings
    refused(lambda: client.update_log_settings({"log_info": True}), "UNIMPLEMENTED", "settings")


def whole(client: triton.InferenceServerClient) -> str:
    """All three conventions say the same; several prompts in one request are answered in order."""
    asked = [triton.InferRequestedOutput(n) for n in ("text_output", "output_ids", "num_output_tokens")]
    first = client.infer(
        MODEL, trtllm("One", 12, stream=True), request_id="r1", outputs=asked, priority=1, timeout=5_000_000
    )
    said = text_of(first)
    assert first.get_response().id == "r1" and first.get_response().model_version == "1"
    assert first.as_numpy("output_ids").shape == (1, 12) and first.as_numpy("num_output_tokens")[0] == 12
    assert text_of(client.infer(MODEL, vllm("One", 12))) == said
    dynamo = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
    plain = client.infer(MODEL, [texts("text_input", "One")], parameters=dynamo)
    assert text_of(plain) == said and plain.as_numpy("finish_reason")[0] == b"length"
    both = client.infer(MODEL, [texts("text_input", "One", "Two", shape=(2, 1)), *trtllm("", 12)[1:]])
    one, two = (t.decode() for t in both.as_numpy("text_output"))
    assert one == said and two != said
    echoed = [*trtllm("One", 12), value("exclude_input_in_output", "BOOL", False, np.bool_)]
    assert text_of(client.infer(MODEL, echoed)) == "One" + said
    ids = triton.InferInput("input_ids", [1, 3], "INT32")
    ids.set_data_from_numpy(np.array([[1, 2, 3]], dtype=np.int32))
    assert client.infer(MODEL, [ids, *trtllm("", 3)[1:]]).as_numpy("text_output").shape == (1,)
    choices = {"n": 2, "max_tokens": 4, "seed": 3}
    several = client.infer(MODEL, [texts("text_input", "One", "Two")], parameters=choices)
    assert several.as_numpy("text_output").shape == (4,)
    return said


def sequences(client: triton.InferenceServerClient) -> None:
    """A conversation: each request sees what was said before it."""
    first = text_of(client.infer(MODEL, trtllm("One", 6), sequence_id=7, sequence_start=True))
    second = text_of(client.infer(MODEL, trtllm(" and", 6), sequence_id=7, sequence_end=True))
    assert second == text_of(client.infer(MODEL, trtllm(f"One{first} and", 6)))
    named = client.infer(MODEL, trtllm("One", 6), sequence_id="s", sequence_start=True, sequence_end=True)
    assert text_of(named) == first
    again = {"sequence_id": 7, "sequence_end": True}
    refused(lambda: client.infer(MODEL, trtllm("x", 1), **again), "INVALID_ARGUMENT", "'7'")


def refusals(client: triton.InferenceServerClient) -> None:
    def ask(*inputs: triton.InferInput, **more: object):
        return lambda: client.infer(MODEL, list(inputs), **more)

    prompt = texts("text_input", "One")
    refused(
        ask(prompt, value("temperature", "FP32", 3.0, np.float32)), "INVALID_ARGUMENT", "temperature", "2"
    )
    refused(ask(prompt, value("max_tokens", "FP32", 0.5, np.float32)), "INVALID_ARGUMENT", "max_tokens")
    refused(ask(prompt, value("top", "INT32", 1, np.int32)), "INVALID_ARGUMENT", "input 'top'", "top_k")
    refused(ask(prompt, priority=11), "INVALID_ARGUMENT", "priority", "10")
    refused(ask(prompt, parameters={"maxtokens": 1}), "INVALID_ARGUMENT", "maxtokens")
    refused(ask(prompt, texts("sampling_parameters", "{")), "INVALID_ARGUMENT", "sampling_parameters", "JSON")
    refused(ask(texts("stop", "x")), "INVALID_ARGUMENT", "text_input")
    refused(ask(prompt, value("beam_width", "INT32", 2, np.int32)), "INVALID_ARGUMENT", "beam_width", "1")
    refused(ask(prompt, sequence_id=5), "INVALID_ARGUMENT", "sequence_id", "sequence_start")
    refused(ask(prompt, outputs=[triton.InferRequestedOutput("logits")]), "INVALID_ARGUMENT", "logits")
    refused(lambda: client.infer("nonsense", [prompt]), "NOT_FOUND", "nonsense")
    refused(lambda: client.infer(MODEL, [prompt], model_version="3"), "NOT_FOUND", "3")
    slow = trtllm("Late", 3000)
    refused(lambda: client.infer(MODEL, slow, client_timeout=0.3), "DEADLINE_EXCEEDED")


def streams(address: str, said: str) -> None:
    """Three at once on one stream, one of them bad: ids keep them apart."""
    with triton.InferenceServerClient(address) as client:
        heard: queue.Queue = queue.Queue()
        client.start_stream(lambda result, error: heard.put((result, error)))
        for name, inputs in (("a", trtllm("One", 12, True)), ("b", vllm("Two", 9, True))):
            client.async_stream_infer(MODEL, inputs, request_id=name, enable_empty_final_response=True)
        client.async_stream_infer(MODEL, trtllm("One", 0, True), request_id="bad")
        client.async_stream_infer(MODEL, trtllm("One", 12), request_id="whole")
        got: dict[str, list[str]] = {}
        finals, errors = set(), []
        while len(finals) + len(errors) < 4:
            result, error = heard.get(timeout=30)
            if error is not None:
                errors.append(error.message())
                continue
            response = result.get_response()
            assert response.id not in finals, "more after the last"
            if response.parameters["triton_final_response"].bool_param:
                finals.add(response.id)
                assert result.as_numpy("finish_reason")[0] == b"length"
            got.setdefault(response.id, []).append(text_of(result))
        client.stop_stream()
        assert finals == {"a", "b", "whole"} and "".join(got["a"]) == said
        assert got["whole"] == [said] and len(got["a"]) > 1 and len(got["b"]) > 1
        assert errors == ["max_tokens: 0; at least 1"], errors


def left(address: str) -> None:
    """A stream that is cancelled in the middle."""
    with triton.InferenceServerClient(address) as client:
        heard: queue.Queue = queue.Queue()
        client.start_stream(lambda result, error: heard.put((result, error)))
        parameters = {"client_key": "left-by-triton"}
        client.async_stream_infer(MODEL, trtllm("Long", 3000, True), request_id="x", parameters=parameters)
        result, error = heard.get(timeout=30)
        assert error is None and result.get_response().id == "x"
        client.stop_stream(cancel_requests=True)


def statistics(client: triton.InferenceServerClient) -> dict[str, int]:
    (of_model,) = client.get_inference_statistics(MODEL).model_stats
    assert of_model.inference_count >= of_model.execution_count > 0
    assert sum(batch.compute_infer.count for batch in of_model.batch_stats) == of_model.execution_count
    assert of_model.inference_stats.success.count > 0 and of_model.inference_stats.queue.ns > 0
    assert any(batch.batch_size > 1 for batch in of_model.batch_stats)  # some shared a step
    (same,) = client.get_inference_statistics().model_stats
    assert same.name == MODEL
    return {"inferences": of_model.inference_count, "executions": of_model.execution_count}


def repository(client: triton.InferenceServerClient) -> None:
    (entry,) = client.get_model_repository_index().models
    assert (entry.name, entry.version, entry.state) == (MODEL, "1", "READY")
    client.load_model(MODEL)
    refused(lambda: client.load_model("nonsense"), "NOT_FOUND", "nonsense")
    refused(lambda: client.unload_model("nonsense"), "NOT_FOUND", "nonsense")
    refused(lambda: client.load_model(MODEL, config="{}"), "INVALID_ARGUMENT", "config")


async def over_asyncio(address: str, said: str) -> None:
    async with triton_aio.InferenceServerClient(address) as client:
        assert await client.is_model_ready(MODEL)
        answers = await asyncio.gather(*(client.infer(MODEL, trtllm("One", 12)) for _ in range(4)))
        assert [text_of(answer) for answer in answers] == [said] * 4

        async def asked():
            for name in ("p", "q"):
                yield {
                    "model_name": MODEL,
                    "inputs": trtllm("One", 12, True),
                    "request_id": name,
                    "enable_empty_final_response": True,
                }

        got = {"p": "", "q": ""}
        open_ = set(got)
        stream = client.stream_infer(asked())
        async for result, error in stream:
            assert error is None, error
            response = result.get_response()
            got[response.id] += text_of(result)
            if response.parameters["triton_final_response"].bool_param:
                open_.discard(response.id)
                if not open_:
                    break
        stream.cancel()
        assert got == {"p": said, "q": said}


def main(address: str) -> None:
    with triton.InferenceServerClient(address) as client:
        told_of(client)
        said = whole(client)
        sequences(client)
        refusals(client)
        streams(address, said)
        left(address)
        asyncio.run(over_asyncio(address, said))
        counts = statistics(client)
        repository(client)
    sys.stdout.write(json.dumps({"said": said, **counts}))


if __name__ == "__main__":
    main(sys.argv[1])
