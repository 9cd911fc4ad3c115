#include "ranks.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <new>
#include <thread>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#endif

namespace {

using Time = std::chrono::steady_clock;

constexpr int64_t SLOT = 64 << 10;  // numbers
constexpr int SPINS = 2000;         // some 50 us
constexpr auto YIELD = std::chrono::milliseconds(2);
constexpr int SLEEP_MS = 20;  // at most: an abort wakes nobody

// A rank's own line: how many turns it has begun, and who sleeps on that.
struct alignas(64) Line {
    std::atomic<uint32_t> turn;
    std::atomic<uint32_t> sleepers;
};
static_assert(std::atomic<uint32_t>::is_always_lock_free, "processes share it");

inline void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

void sleep_at(std::atomic<uint32_t> &word, uint32_t value) {
#if defined(__linux__)
    const timespec limit{0, SLEEP_MS * 1000000L};
    syscall(SYS_futex, (uint32_t *)&word, FUTEX_WAIT, value, &limit, nullptr, 0);
#else
    (void)word, (void)value;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
#endif
}

void wake(std::atomic<uint32_t> &word) {
#if defined(__linux__)
    syscall(SYS_futex, (uint32_t *)&word, FUTEX_WAKE, 1 << 30, nullptr, nullptr, 0);
#else
    (void)word;
#endif
}

}  // namespace

struct shoal_ranks {
    Line *lines;
    float *slots;  // [2][ranks][SLOT]
    int64_t ranks, rank;
    std::chrono::milliseconds timeout;
    uint32_t turn = 0;
    std::atomic<bool> aborted{false};

    float *slot(int64_t of) const { return slots + ((turn & 1) * ranks + of) * SLOT; }

    // Its numbers are in its slot: waits for all others'.
    bool meet() {
        Line &own = lines[rank];
        own.turn.store(turn, std::memory_order_seq_cst);
        if (own.sleepers.load(std::memory_order_seq_cst)) wake(own.turn);
        for (int64_t r = 0; r < ranks; r++)
            if (r != rank && !reached(lines[r])) return false;
        return true;
    }

    bool here(const Line &line) const { return (int32_t)(line.turn.load(std::memory_order_seq_cst) - turn) >= 0; }

    bool reached(Line &line) {
        for (int i = 0; i < SPINS; i++) {
            if (here(line)) return true;
            pause_briefly();
        }
        const auto begun = Time::now();
        while (Time::now() - begun < YIELD) {
            if (here(line)) return true;
            std::this_thread::yield();
        }
        while (!aborted.load(std::memory_order_relaxed)) {
            line.sleepers.fetch_add(1, std::memory_order_seq_cst);
            const uint32_t seen = line.turn.load(std::memory_order_seq_cst);
            if ((int32_t)(seen - turn) < 0) sleep_at(line.turn, seen);
            line.sleepers.fetch_sub(1, std::memory_order_seq_cst);
            if (here(line)) return true;
            if (Time::now() - begun > timeout) aborted = true;
        }
        return false;
    }
};

int64_t shoal_ranks_bytes(int64_t ranks) {
    return ranks * (int64_t)sizeof(Line) + 2 * ranks * SLOT * (int64_t)sizeof(float);
}

shoal_ranks *shoal_ranks_open(void *memory, int64_t ranks, int64_t rank, int64_t timeout_ms) {
    Line *lines = (Line *)memory;
    float *slots = (float *)(lines + ranks);
    return new (std::nothrow) shoal_ranks{lines, slots, ranks, rank, std::chrono::milliseconds(timeout_ms)};
}

void shoal_ranks_destroy(shoal_ranks *ranks) { delete ranks; }

void shoal_ranks_abort(shoal_ranks *ranks) { ranks->aborted = true; }

int shoal_ranks_sum(shoal_ranks *ranks, float *rows, int64_t count) {
    for (int64_t at = 0; at < count; at += SLOT) {
        if (ranks->aborted) return -1;
        const int64_t n = std::min(SLOT, count - at);
        float *to = rows + at;
        ranks->turn++;
        std::copy(to, to + n, ranks->slot(ranks->rank));
        if (!ranks->meet()) return -1;
        const float *first = ranks->slot(0), *second = ranks->slot(1);
        for (int64_t i = 0; i < n; i++) to[i] = first[i] + second[i];
        for (int64_t r = 2; r < ranks->ranks; r++) {
            const float *next = ranks->slot(r);
            for (int64_t i = 0; i < n; i++) to[i] += next[i];
        }
    }
    return 0;
}

int shoal_ranks_gather(shoal_ranks *ranks, const float *own, const int64_t *counts, float *const *parts) {
    const int64_t most = *std::max_element(counts, counts + ranks->ranks);
    for (int64_t at = 0; at < most; at += SLOT) {
        if (ranks->aborted) return -1;
        auto length = [&](int64_t r) { return std::clamp(counts[r] - at, (int64_t)0, SLOT); };
        ranks->turn++;
        if (const int64_t n = length(ranks->rank); n && !parts) std::copy(own + at, own + at + n, ranks->slot(ranks->rank));
        if (!ranks->meet()) return -1;
        if (!parts) continue;
        std::copy(own + at, own + at + length(0), parts[0] + at);
        for (int64_t r = 1; r < ranks->ranks; r++) std::copy(ranks->slot(r), ranks->slot(r) + length(r), parts[r] + at);
    }
    return 0;
}
