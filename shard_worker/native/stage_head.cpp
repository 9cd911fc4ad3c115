// The logits of a run's tokens.
#include <algorithm>
#include <vector>

#include "stage_state.h"

namespace shoal {

// Where the last run left a token's row; -1: nowhere.
int64_t Stage::row_of(int64_t token) const {
    if (!trimmed) return token >= 0 && token < num_kept ? token : -1;
    const int64_t *end = kept + num_kept, *at = std::lower_bound((const int64_t *)kept, end, token);
    return at < end && *at == token ? at - kept : -1;
}

void Stage::run_head(int part) {
    Clock clock(part == 0 ? times : nullptr);
    own_rows(num_places, part, [&](int64_t i) {
        ops.rms_norm(hidden + row_of(places[i]) * c.hidden, c.head_norm, c.rms_eps, c.hidden, normed + i * c.hidden);
    });
    barrier.wait();
    const std::vector<Piece> &pieces = head.pieces;
    share(pieces.size(), [&](int64_t i) {
        head.run(pieces[i], multiply, {normed, nullptr, c.hidden}, num_places, logits, c.vocab, scratch_of(part));
    });
    barrier.wait();
    if (c.logit_softcap != 0.0f)
        own_rows(num_places, part, [&](int64_t i) { ops.cap_row(logits + i * c.vocab, c.logit_softcap, c.vocab); });
    barrier.wait();
    clock.spent(SHOAL_TIME_HEAD);
}

}  // namespace shoal

int shoal_stage_logits(shoal_stage *stage, const int64_t *places, int64_t count, float *logits) {
    if (count > stage->tokens_max) return -1;
    for (int64_t i = 0; i < count; i++)
        if (stage->row_of(places[i]) < 0) return -1;
    if (!count) return 0;
    stage->places = places, stage->num_places = count, stage->logits = logits;
    shoal_pool_run(stage->pool, [](void *arg, int part, int) { ((shoal_stage *)arg)->run_head(part); }, stage);
    return 0;
}
