// Memory that a stage takes once, by cache lines.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <new>

namespace shoal {

constexpr int64_t ALIGNMENT = 64;

struct Free {
    void operator()(void *p) const { ::operator delete(p, std::align_val_t(ALIGNMENT)); }
};

// Untouched until it is written: what a small step does not reach takes no memory.
template <typename T>
class Buffer {
public:
    void take(int64_t count) {
        data_.reset();
        data_.reset((T *)::operator new((size_t)std::max<int64_t>(1, count) * sizeof(T), std::align_val_t(ALIGNMENT)));
    }
    operator T *() const { return data_.get(); }

private:
    std::unique_ptr<T, Free> data_;
};

}  // namespace shoal
