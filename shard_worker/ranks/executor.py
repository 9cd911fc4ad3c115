"""The executor of one rank: loads its share of a layer range, and agrees with the others on the KV pool.

The pool has as many blocks as the rank with the least room. What the leader's executor is asked to do it
tells the others, in the same order, so that all stand alike after every call; where one can't load, none has.
"""

from collections.abc import Callable

from shard_worker import kv_tensors
from shard_worker.device.stage import DeviceStage
from shard_worker.executor import U32, Loaded, LoadFailed, Pages, StageSpec, check_spec
from shard_worker.formats import is_finite
from shard_worker.model.families import FAMILIES, stage_weights
from shard_worker.model.stage import Stage
from shard_worker.model.stage_weights import StageWeights
from shard_worker.native_stage import NativeStage
from shard_worker.ranks.collective import Collective
from shard_worker.ranks.frames import Kind
from shard_worker.ranks.leader import Followers
from shard_worker.ranks.pages import RanksPages
from shard_worker.ranks.room import room_of_share
from shard_worker.ranks.shares import Share, inner_unit, refusal, shares
from shard_worker.ranks.split import packed_unit, rank_weights, refuse_what_is_no_number
from shard_worker.ranks.stage import EmbeddingPart, LeaderStage, RankStage
from shard_worker.ranks.words import Load, pack, pack_copy
from shard_worker.room import Room, bound_of, held_as
from shard_worker.torch_executor import EngineConfig, TorchExecutor


class RankExecutor(TorchExecutor):
    def __init__(self, config: EngineConfig, rank: int, ranks: int) -> None:
        """Raises LoadFailed: also where this engine, or the model, can't be shared out."""
        super().__init__(config)
        if (reason := self._unshared()) is not None:
            raise LoadFailed(f"tensor_parallel {ranks}: {reason}")
        model = self._checkpoint.config
        if why := refusal(model, ranks):
            raise LoadFailed(f"tensor_parallel {ranks}: {why}")
        self.rank, self.ranks = rank, ranks
        self.turn = 0  # how often memory was taken
        self._collective: Collective | None = None
        self._agree: Callable[[int], int] | None = None

    def _unshared(self) -> str | None:
        if self._by_library:
            return "a model run by the transformers library can't be shared out"
        if self._checkpoint.config.family not in FAMILIES:
            return "no file here describes the layers of this model"
        return self._not_there()

    @property
    def settings(self) -> str:
        """All that the numbers depend on, beside the model's digest."""
        config = self._config
        device = self.device.type  # also how they sum up
        return f"dtype {config.dtype}, quantize {config.quantize}, engine {config.engine}, device {device}"

    def room(self, weights_mb: int) -> Room:
        """For layers within `weights_mb` at this rank; 0: a device's share, else no bound."""
        model, config = self._checkpoint, self._config
        whole = stage_weights(model, 0, model.config.num_layers)
        share, bound = self._shares(whole)[self.rank], bound_of(self.device, weights_mb)
        return room_of_share(whole, share, *held_as(self.device, config), bound)

    def _shares(self, whole: StageWeights) -> tuple[Share, ...]:
        return shares(whole, self.ranks, inner_unit(whole, self.ranks, packed_unit(whole)))

    def meet(self, collective: Collective, agree: Callable[[int], int]) -> None:
        """Before the first load. `agree`: on the number of blocks, over all ranks; raises LoadFailed."""
        self._collective, self._agree = collective, agree

    def load_as(self, spec: StageSpec, anew: bool) -> Loaded:
        """As the leader says it is. Raises LoadFailed."""
        if not anew and self._is_new(spec):
            raise LoadFailed("this rank's memory is not what the leader takes it for")
        return self._loaded(spec, anew)

    def _take_memory(self, spec: StageSpec) -> None:
        self.turn += 1
        super()._take_memory(spec)

    def _kv_of(self, stage: Stage) -> tuple[kv_tensors.KvHeads, kv_tensors.KvForm]:
        assert isinstance(stage, RankStage)
        if isinstance(stage.inner, NativeStage):
            return stage.inner.weights, stage.inner.kv_form
        heads: StageWeights = stage.inner.weights  # type: ignore[attr-defined]
        return heads, kv_tensors.KvForm(self._precision.compute)

    def _there(self, stage: Stage) -> DeviceStage | None:
        return stage.inner if isinstance(stage, RankStage) and isinstance(stage.inner, DeviceStage) else None

    def _num_blocks(self, spec: StageSpec, stage: Stage) -> int:
        assert self._agree is not None
        return self._agree(super()._num_blocks(spec, stage))

    def _make_stage(self, spec: StageSpec) -> Stage:
        assert self._collective is not None, "load before the ranks have met"
        whole = stage_weights(self._checkpoint, spec.first_layer, spec.end_layer)
        of_ranks = self._shares(whole)
        share = of_ranks[self.rank]
        own = rank_weights(whole, share, self.rank == 0, self._config.dtype, self._config.quantize)
        refuse_what_is_no_number(own, self._checkpoint.path)
        embedding = self._embedding_part(whole, share)
        del whole
        return self._rank_stage(self._stage_of(own, self._collective.sum), of_ranks, embedding)

    def _embedding_part(self, whole: StageWeights, share: Share) -> EmbeddingPart | None:
        """Raises LoadFailed."""
        if whole.embedding is None:
            return None
        ids, config = share.vocabulary, self._config
        part = type(whole.embedding)(
            whole.embedding.format, whole.embedding.rows[ids.start : ids.stop], whole.embedding.inputs
        )
        if not is_finite(part):
            raise LoadFailed(f"{self._checkpoint.path}: the embedding holds what is no number")
        return EmbeddingPart(part, ids.start, whole.embedding_scale, self._precision.dtype, config.quantize)

    def _rank_stage(
        self, inner: Stage, of_ranks: tuple[Share, ...], embedding: EmbeddingPart | None
    ) -> RankStage:
        assert self._collective is not None
        return RankStage(inner, self._collective, of_ranks, embedding)


class LeaderExecutor(RankExecutor):
    def __init__(self, config: EngineConfig, followers: Followers) -> None:
        super().__init__(config, 0, followers.ranks)
        self._followers = followers
        self._agreed = True
        self._pages: RanksPages | None = None

    def ready(self) -> None:
        """When all ranks are here. There is room for as many layers as at the rank with the least."""
        facts = self.facts
        least = self._followers.least_room(facts.layers_max)
        self.take_room(least, facts.head_layers, facts.ends_layers)
        self.meet(self._followers.collective, self._agree_with_all)

    def _agree_with_all(self, own: int) -> int:
        self._agreed = True
        return self._followers.agree(own)

    def load(self, spec: StageSpec) -> Loaded:
        check_spec(spec, self._checkpoint.config.num_layers)
        anew = self._is_new(spec)
        self._followers.tell(Kind.LOAD, pack(Load.of(spec, anew)))
        self._agreed = not anew
        failed = loaded = None
        try:
            loaded = self._loaded(spec, anew)
        except LoadFailed as error:
            failed = error
        except BaseException as error:
            self._followers.lose(f"a load failed: {error}")
            raise
        if not self._agreed:
            self._followers.agree_on_none()
        answers = self._followers.answers()
        errors = [f"rank {rank}: {answer.error}" for rank, answer in answers if answer.error]
        if loaded is None or errors:
            self._resident = self._spec = None
            raise failed or LoadFailed("; ".join(errors))
        if anew:
            local = super().pages
            assert local is not None
            self._pages = RanksPages(local, self._followers, self.turn, [answer for _, answer in answers])
        return loaded

    @property
    def pages(self) -> Pages | None:
        """Of all ranks together."""
        return None if self._resident is None else self._pages

    def copy_blocks(self, sources: U32, targets: U32) -> None:
        self._followers.tell(Kind.COPY, pack_copy(sources, targets))
        super().copy_blocks(sources, targets)

    def _rank_stage(
        self, inner: Stage, of_ranks: tuple[Share, ...], embedding: EmbeddingPart | None
    ) -> RankStage:
        assert self._collective is not None
        followers = self._followers
        return LeaderStage(inner, self._collective, of_ranks, embedding, followers.tell, followers.lose)
