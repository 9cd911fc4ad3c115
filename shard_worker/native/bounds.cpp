// What this machine can do at most, as a step's bounds: memory read, and products multiplied and added, a second.
//
// Each thread reads its own share from front to back, or keeps enough chains of products under way to fill its units.
#include "pool.h"
#include "vec8.h"

using namespace shoal;

namespace {

constexpr int CHAINS = 12;

struct Read {
    const float *data;
    int64_t count;
    float *sums;
};

void read_part(void *arg, int part, int parts) {
    const Read &r = *(const Read *)arg;
    int64_t share = r.count / parts / (CHAINS * LANES) * (CHAINS * LANES);
    const float *p = r.data + part * share, *end = p + share;
    v8 sums[CHAINS] = {};
    for (; p < end; p += CHAINS * LANES)
        for (int i = 0; i < CHAINS; i++) sums[i] += load(p + i * LANES);
    v8 total = sums[0];
    for (int i = 1; i < CHAINS; i++) total += sums[i];
    store(r.sums + part * LANES, total);
}

struct Multiply {
    int64_t rounds;
    float *sums;
};

void multiply_part(void *arg, int part, int) {
    const Multiply &m = *(const Multiply *)arg;
    v8 sums[CHAINS];
    v8 x = set1(m.sums[part * LANES]), y = set1(m.sums[part * LANES] * 0.5f);
    for (int i = 0; i < CHAINS; i++) sums[i] = set1(float(i));  // equal chains would be computed once
    for (int64_t round = 0; round < m.rounds; round++) {
#pragma GCC unroll 12
        for (int i = 0; i < CHAINS; i++) sums[i] = fma(x, y, sums[i]);
        asm volatile("");  // or the loops change places, and each chain waits for itself
    }
    v8 total = sums[0];
    for (int i = 1; i < CHAINS; i++) total += sums[i];
    store(m.sums + part * LANES, total);
}

}  // namespace

extern "C" {

// Reads `count` floats once; sums[threads][8] takes what keeps the compiler from leaving it out. Returns how many.
int64_t shoal_bounds_read(shoal_pool *pool, const float *data, int64_t count, float *sums) {
    Read r = {data, count, sums};
    shoal_pool_run(pool, read_part, &r);
    int64_t parts = shoal_pool_threads(pool);
    return count / parts / (CHAINS * LANES) * (CHAINS * LANES) * parts;
}

// Returns how many products were multiplied and added, all threads together.
int64_t shoal_bounds_multiply(shoal_pool *pool, int64_t rounds, float *sums) {
    Multiply m = {rounds, sums};
    shoal_pool_run(pool, multiply_part, &m);
    return rounds * CHAINS * LANES * shoal_pool_threads(pool);
}
}
