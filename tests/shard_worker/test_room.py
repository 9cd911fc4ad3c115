"""How many layers there is memory for: with what the ends hold beside them, once or twice."""

from pathlib import Path

import pytest

from batcher.shares import Server
from shard_worker.room import Room, room_of, weight_bytes
from shard_worker.torch_executor import EngineConfig, TorchExecutor
from tests.shard_worker import tiny_models

LAYERS = 8


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An embedding of six layers' weights."""
    path = tmp_path_factory.mktemp("room")
    tiny_models.make_small(
        path,
        "llama",
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=LAYERS,
        vocab_size=5000,
        tie_word_embeddings=request.param,
    )
    tiny_models.save_tokenizer(path, tiny_models.SMALL_VOCAB)
    return path


@pytest.mark.parametrize("weights_mb", [2, 3, 4])
@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_no_stage_has_room_for_more_than_its_bound_and_none_for_less(
    folder: Path, weights_mb: int, quantize: str
) -> None:
    config = EngineConfig(str(folder), quantize=quantize, digest_cache_dir=str(folder / "digests"))
    executor = TorchExecutor(config)
    room = room_of(executor, config, weights_mb)
    server = Server("w", 1.0, 0.0, room.layers_max, room.head_layers, room.ends_layers)
    bound = weights_mb << 20

    def fits(first: int, end: int) -> bool:
        return weight_bytes(executor, config, first, end) <= bound

    for count in range(1, LAYERS - 1):
        assert (server.rooms(False, False) >= count) == fits(1, 1 + count)
        heavier = max(
            weight_bytes(executor, config, 0, count), weight_bytes(executor, config, LAYERS - count, LAYERS)
        )
        assert (server.rooms(True, False) >= count) == (heavier <= bound)
    assert (server.rooms(True, True) >= LAYERS) == fits(0, LAYERS)


def test_without_a_bound_there_is_room_for_all(folder: Path) -> None:
    config = EngineConfig(str(folder), digest_cache_dir=str(folder / "digests"))
    assert room_of(TorchExecutor(config), config, 0) == Room(0)
