// Where the threads of a step wait for each other, a few times a layer.
//
// Rules: a wait is usually shorter than a sleep and its wake-up, so it spins first, then lets others run, then sleeps:
// a neighbour whose core was taken must not cost this one too. The last to arrive hands out the next share from 0.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace shoal {

class Barrier {
public:
    explicit Barrier(int threads) : threads_(threads) {}

    // The next share of the work between two waits; each is handed out once.
    int64_t take() { return next_.fetch_add(1, std::memory_order_relaxed); }

    void wait() {
        if (threads_ == 1) {
            next_.store(0, std::memory_order_relaxed);
            return;
        }
        const uint32_t turn = turn_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
            arrived_.store(0, std::memory_order_relaxed);
            next_.store(0, std::memory_order_relaxed);
            turn_.store(turn + 1, std::memory_order_seq_cst);
            if (sleepers_.load(std::memory_order_seq_cst)) {
                std::lock_guard<std::mutex> held(lock_);
                wake_.notify_all();
            }
            return;
        }
        for (int i = 0; i < SPINS; i++) {
            if (turn_.load(std::memory_order_acquire) != turn) return;
            pause();
        }
        const auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(YIELD_US);
        while (std::chrono::steady_clock::now() < until) {
            if (turn_.load(std::memory_order_acquire) != turn) return;
            std::this_thread::yield();
        }
        std::unique_lock<std::mutex> held(lock_);
        sleepers_.fetch_add(1, std::memory_order_seq_cst);
        wake_.wait(held, [&] { return turn_.load(std::memory_order_seq_cst) != turn; });
        sleepers_.fetch_sub(1, std::memory_order_relaxed);
    }

private:
    static constexpr int SPINS = 1000;  // some 20 us
    static constexpr int YIELD_US = 1000;

    static void pause() {
#if defined(__x86_64__) || defined(__i386__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
    }

    const int threads_;
    alignas(64) std::atomic<uint32_t> turn_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int64_t> next_{0};
    std::atomic<int> sleepers_{0};
    std::mutex lock_;
    std::condition_variable wake_;
};

}  // namespace shoal
