#include "pool.h"

#include <signal.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <condition_variable>
#include <mutex>
#endif

namespace {

constexpr int kThreadsMax = 256;
constexpr auto kSpin = std::chrono::microseconds(20);
constexpr int kPausesPerClockReading = 16;

inline void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// A counter that threads sleep on until it has a value they wait for.
//
// No wake is lost: a sleeper announces itself before it looks at the value a last time, a writer changes the
// value before it looks for sleepers, and all four accesses are sequentially consistent, so one of the two
// sees the other.
class Counter {
public:
    uint32_t load() const { return value_.load(std::memory_order_acquire); }

    void store_quietly(uint32_t value) { value_.store(value, std::memory_order_relaxed); }

    void add_and_wake(uint32_t delta) {
        value_.fetch_add(delta, std::memory_order_seq_cst);
        wake();
    }

    // Wakes only when zero is reached: who waits on a countdown has no use for the steps before.
    void count_down() {
        if (value_.fetch_sub(1, std::memory_order_seq_cst) == 1) wake();
    }

    // Returns the first value seen that is `done`.
    template <class Done>
    uint32_t wait_until(Done done) {
        uint32_t seen = spin_until(done);
        if (done(seen)) return seen;
        sleepers_.fetch_add(1, std::memory_order_seq_cst);
        while (!done(seen = value_.load(std::memory_order_seq_cst))) sleep_at(seen);
        sleepers_.fetch_sub(1, std::memory_order_relaxed);
        return seen;
    }

private:
    template <class Done>
    uint32_t spin_until(Done done) const {
        const auto deadline = std::chrono::steady_clock::now() + kSpin;
        do {
            for (int i = 0; i < kPausesPerClockReading; ++i) {
                const uint32_t seen = load();
                if (done(seen)) return seen;
                pause_briefly();
            }
        } while (std::chrono::steady_clock::now() < deadline);
        return load();
    }

    void wake() {
        if (sleepers_.load(std::memory_order_seq_cst) > 0) wake_sleepers();
    }

#if defined(__linux__)
    static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t), "the kernel reads the bare word");

    void sleep_at(uint32_t value) {
        syscall(SYS_futex, reinterpret_cast<uint32_t *>(&value_), FUTEX_WAIT_PRIVATE, value, nullptr, nullptr,
                0);
    }
    void wake_sleepers() {
        syscall(SYS_futex, reinterpret_cast<uint32_t *>(&value_), FUTEX_WAKE_PRIVATE, kThreadsMax, nullptr,
                nullptr, 0);
    }
#else
    void sleep_at(uint32_t value) {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [&] { return value_.load(std::memory_order_seq_cst) != value; });
    }
    void wake_sleepers() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
        }  // a sleeper between its look and its sleep is waited for
        changed_.notify_all();
    }
    std::mutex mutex_;
    std::condition_variable changed_;
#endif

    alignas(64) std::atomic<uint32_t> value_{0};
    std::atomic<uint32_t> sleepers_{0};
};

// Threads inherit the mask they are born with: signals stay with the threads that the interpreter knows.
class SignalsBlocked {
public:
    SignalsBlocked() {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before_);
    }
    ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

private:
    sigset_t before_;
};

}  // namespace

struct shoal_pool {
    explicit shoal_pool(int threads) : threads_(threads) {}

    ~shoal_pool() {
        stopping_ = true;
        runs_.add_and_wake(1);
        for (std::thread &thread : helpers_) thread.join();
    }

    void start() {
        SignalsBlocked blocked;
        helpers_.reserve(static_cast<size_t>(threads_ - 1));
        for (int part = 1; part < threads_; ++part) helpers_.emplace_back([this, part] { help(part); });
    }

    void run(void (*work)(void *, int, int), void *arg) {
        if (threads_ == 1) return work(arg, 0, 1);
        work_ = work;
        arg_ = arg;
        unfinished_.store_quietly(static_cast<uint32_t>(threads_ - 1));
        runs_.add_and_wake(1);  // publishes the three above
        work(arg, 0, threads_);
        unfinished_.wait_until([](uint32_t left) { return left == 0; });
    }

    int threads() const { return threads_; }

private:
    void help(int part) {
        for (uint32_t seen = 0;;) {
            // never skips a run: the next starts only after this one's count_down
            seen = runs_.wait_until([seen](uint32_t runs) { return runs != seen; });
            if (stopping_) return;
            work_(arg_, part, threads_);
            unfinished_.count_down();
        }
    }

    const int threads_;
    bool stopping_ = false;
    void (*work_)(void *, int, int) = nullptr;
    void *arg_ = nullptr;
    Counter runs_;
    Counter unfinished_;
    std::vector<std::thread> helpers_;
};

extern "C" shoal_pool *shoal_pool_create(int threads) {
    if (threads < 1 || threads > kThreadsMax) return nullptr;
    try {
        auto pool = std::make_unique<shoal_pool>(threads);
        pool->start();
        return pool.release();
    } catch (const std::exception &) {  // no thread or no memory; those that started are joined
        return nullptr;
    }
}

extern "C" void shoal_pool_destroy(shoal_pool *pool) {
    delete pool;
}

extern "C" int shoal_pool_threads(const shoal_pool *pool) {
    return pool->threads();
}

extern "C" void shoal_pool_run(shoal_pool *pool, void (*work)(void *, int, int), void *arg) {
    pool->run(work, arg);
}
