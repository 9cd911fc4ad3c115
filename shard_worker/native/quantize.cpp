// See quantize.h. A lane is a group of 32 numbers that share a scale, so that sums run in the order of inputs, as in numpy.
#include "quantize.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <thread>
#include <vector>

#include "linear.h"

namespace {

constexpr int kLanes = 16, kGroup = 32;
constexpr float kWeightMax = 6e4f;  // scales are float16

typedef float F __attribute__((vector_size(kLanes * 4)));
typedef int32_t I __attribute__((vector_size(kLanes * 4)));
typedef uint8_t B __attribute__((vector_size(kLanes)));

struct Groups {
    F x[kGroup];
};

// ---- arithmetic

F all(float value) {
    return F{} + value;
}

F smaller(F a, F b) {
    return a < b ? a : b;
}

F larger(F a, F b) {
    return a > b ? a : b;
}

F magnitude(F a) {
    return reinterpret_cast<F>(reinterpret_cast<I>(a) & 0x7fffffff);
}

// To the nearest whole number, ties to even, of what lies within 2^22.
F rounded(F a) {
    constexpr float kShift = 0x1.8p23f;
    return (a + kShift) - kShift;
}

// 1 / a, and 0 where that is none.
F inverse(F a) {
    const F one = 1.0f / a;
    return magnitude(one) <= 0x1.fffffep127f ? one : F{};
}

uint16_t half_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const uint32_t sign = bits >> 16 & 0x8000u;
    uint32_t size = bits & 0x7fffffffu;
    if (size < 0x38800000u) {  // below 2^-14 halves are multiples of 2^-24, which is what a float near 0.5 rounds to
        float shifted;
        std::memcpy(&shifted, &size, 4);
        shifted += 0.5f;
        std::memcpy(&size, &shifted, 4);
        size -= 0x3f000000u;
    } else {
        size = std::min((size - 0x38000000u + 0xfffu + (size >> 13 & 1u)) >> 13, 0x7c00u);
    }
    return static_cast<uint16_t>(sign | size);
}

float float_of(uint16_t half) {
    const uint32_t sign = (half & 0x8000u) << 16, size = half & 0x7fffu;
    uint32_t bits = size << 13;
    if (size >= 0x7c00u) {
        bits = 0x7f800000u;
    } else if (size >= 0x400u) {
        bits += 0x38000000u;
    } else {
        const float small = static_cast<float>(size) * 0x1p-24f;
        std::memcpy(&bits, &small, 4);
    }
    bits |= sign;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// Rounded to what float16 holds, and as float16.
struct Halves {
    uint16_t bits[kLanes];
    F values;

    explicit Halves(F exact) {
        float numbers[kLanes];
        std::memcpy(numbers, &exact, sizeof numbers);
        for (int lane = 0; lane < kLanes; ++lane) bits[lane] = half_of(numbers[lane]);
        for (int lane = 0; lane < kLanes; ++lane) numbers[lane] = float_of(bits[lane]);
        std::memcpy(&values, numbers, sizeof numbers);
    }
};

template <class Value>
F sum_of(Value value) {
    F sum{};
    for (int i = 0; i < kGroup; ++i) sum += value(i);
    return sum;
}

F dot(const Groups &a, const Groups &b) {
    return sum_of([&](int i) { return a.x[i] * b.x[i]; });
}

void take_levels(const Groups &x, F scale, float lowest, float highest, Groups &levels) {
    for (int i = 0; i < kGroup; ++i)
        levels.x[i] = smaller(larger(rounded(x.x[i] * scale), all(lowest)), all(highest));
}

void shift(const Groups &x, F by, Groups &out) {
    for (int i = 0; i < kGroup; ++i) out.x[i] = x.x[i] - by;
}

F least(const Groups &x) {
    F low = x.x[0];
    for (int i = 1; i < kGroup; ++i) low = smaller(low, x.x[i]);
    return low;
}

F largest(const Groups &x) {
    F high = x.x[0];
    for (int i = 1; i < kGroup; ++i) high = larger(high, x.x[i]);
    return high;
}

F mean_of(const Groups &x) {
    return sum_of([&](int i) { return x.x[i]; }) / float{kGroup};
}

// ---- out

B bytes_of(F levels) {
    return __builtin_convertvector(__builtin_convertvector(levels, I), B);
}

// A byte of every lane after the other, to where the lanes' blocks have their codes.
template <int kCount>
void put_bytes(const B (&bytes)[kCount], int lanes, uint8_t *codes, int block_bytes) {
    uint8_t flat[kCount][kLanes];
    std::memcpy(flat, bytes, sizeof flat);
    for (int lane = 0; lane < lanes; ++lane)
        for (int i = 0; i < kCount; ++i) codes[lane * block_bytes + i] = flat[i][lane];
}

// Codes 0 to 15: the first half of a group in the low bits.
void put_nibbles(const Groups &levels, float offset, int lanes, uint8_t *codes, int block_bytes) {
    B bytes[kGroup / 2];
    for (int i = 0; i < kGroup / 2; ++i)
        bytes[i] = bytes_of(levels.x[i] + offset) | bytes_of(levels.x[i + kGroup / 2] + offset) << 4;
    put_bytes(bytes, lanes, codes, block_bytes);
}

// ---- the formats: the scale that fits the levels best, as formats.py has it

struct Q8_0 {
    static constexpr int kBytes = 34;

    static void make(const Groups &x, int lanes, uint8_t *out) {
        F high{};
        for (int i = 0; i < kGroup; ++i) high = larger(high, magnitude(x.x[i]));
        const Halves first(high / 127.0f);
        Groups levels, again;
        take_levels(x, inverse(first.values), -127, 127, levels);
        const Halves fitted(dot(x, levels) * inverse(dot(levels, levels)));
        take_levels(x, inverse(fitted.values), -127, 127, again);
        const I better = error(x, again, fitted.values) < error(x, levels, first.values);
        B bytes[kGroup];
        for (int i = 0; i < kGroup; ++i) bytes[i] = bytes_of(better ? again.x[i] : levels.x[i]);
        put_bytes(bytes, lanes, out + 2, kBytes);
        for (int lane = 0; lane < lanes; ++lane)
            std::memcpy(out + lane * kBytes, (better[lane] ? fitted : first).bits + lane, 2);
    }

    static F error(const Groups &x, const Groups &levels, F scale) {
        return sum_of([&](int i) {
            const F off = x.x[i] - levels.x[i] * scale;
            return off * off;
        });
    }
};

struct Q4_0 {
    static constexpr int kBytes = 18;
    static constexpr float kSteps[] = {-7.0f, -7.4f, -7.7f, -8.0f, -8.3f, -8.7f, 7.4f, 8.0f};

    static void make(const Groups &x, int lanes, uint8_t *out) {
        const F high = largest(x), low = least(x);
        const F per_step = inverse(-low > high ? low : high);
        F best = all(-1), scale{};
        Groups levels;
        for (const float step : kSteps) {
            take_levels(x, step * per_step, -8, 7, levels);
            const F product = dot(x, levels), fit = product * inverse(dot(levels, levels)), gain = product * fit;
            scale = gain > best ? fit : scale;
            best = larger(gain, best);
        }
        const Halves kept(scale);
        take_levels(x, inverse(kept.values), -8, 7, levels);
        put_nibbles(levels, 8, lanes, out + 2, kBytes);
        for (int lane = 0; lane < lanes; ++lane) std::memcpy(out + lane * kBytes, kept.bits + lane, 2);
    }
};

struct Q4_1 {
    static constexpr int kBytes = 20;
    static constexpr float kSteps[] = {13.0f, 13.6f, 14.2f, 14.6f, 15.0f, 15.4f};

    static void make(const Groups &x, int lanes, uint8_t *out) {
        const F low = least(x), mean = mean_of(x), per_step = inverse(largest(x) - low);
        Groups above, around, levels;
        shift(x, low, above);
        shift(x, mean, around);
        F best = all(-1), scale{}, offset = low;
        for (const float step : kSteps) {
            take_levels(above, step * per_step, 0, 15, levels);
            const F middle = mean_of(levels);
            shift(levels, middle, levels);
            const F product = dot(around, levels), fit = product * inverse(dot(levels, levels));
            const F gain = product * fit;
            const I better = gain > best;
            scale = better ? fit : scale;
            offset = better ? mean - fit * middle : offset;
            best = larger(gain, best);
        }
        const Halves kept(scale), from(offset);
        shift(x, from.values, above);
        take_levels(above, inverse(kept.values), 0, 15, levels);
        put_nibbles(levels, 0, lanes, out + 4, kBytes);
        for (int lane = 0; lane < lanes; ++lane) {
            std::memcpy(out + lane * kBytes, kept.bits + lane, 2);
            std::memcpy(out + lane * kBytes + 2, from.bits + lane, 2);
        }
    }
};

// ---- in

struct FromF32 {
    static constexpr int kBytes = 4;
    static float read(const uint8_t *at) {
        float value;
        std::memcpy(&value, at, 4);
        return value;
    }
};

struct FromBf16 {
    static constexpr int kBytes = 2;
    static float read(const uint8_t *at) {
        uint16_t half;
        std::memcpy(&half, at, 2);
        const uint32_t bits = uint32_t{half} << 16;
        float value;
        std::memcpy(&value, &bits, 4);
        return value;
    }
};

struct FromF16 {
    static constexpr int kBytes = 2;
    static float read(const uint8_t *at) {
        uint16_t half;
        std::memcpy(&half, at, 2);
        return float_of(half);  // infinite for what is no number: refused either way
    }
};

// Groups [begin, end); whether all numbers fit.
template <class From, class To>
bool quantise(const uint8_t *values, int64_t begin, int64_t end, uint8_t *blocks) {
    bool fits = true;
    for (int64_t first = begin; first < end; first += kLanes) {
        const int lanes = static_cast<int>(std::min<int64_t>(kLanes, end - first));
        float turned[kGroup][kLanes] = {};
        for (int lane = 0; lane < lanes; ++lane) {
            const uint8_t *group = values + (first + lane) * kGroup * From::kBytes;
            float numbers[kGroup];
            for (int i = 0; i < kGroup; ++i) numbers[i] = From::read(group + i * From::kBytes);
            for (int i = 0; i < kGroup; ++i) fits &= numbers[i] <= kWeightMax && numbers[i] >= -kWeightMax;
            for (int i = 0; i < kGroup; ++i) turned[i][lane] = numbers[i];
        }
        if (!fits) return false;
        Groups x;
        std::memcpy(&x, turned, sizeof x);
        To::make(x, lanes, blocks + first * To::kBytes);
    }
    return true;
}

using Quantise = bool (*)(const uint8_t *values, int64_t begin, int64_t end, uint8_t *blocks);

template <class From>
Quantise quantise_to(int to) {
    switch (to) {
        case SHOAL_Q8_0: return quantise<From, Q8_0>;
        case SHOAL_Q4_0: return quantise<From, Q4_0>;
        case SHOAL_Q4_1: return quantise<From, Q4_1>;
        default: return nullptr;
    }
}

Quantise quantise_between(int from, int to) {
    switch (from) {
        case SHOAL_F32: return quantise_to<FromF32>(to);
        case SHOAL_BF16: return quantise_to<FromBf16>(to);
        case SHOAL_F16: return quantise_to<FromF16>(to);
        default: return nullptr;
    }
}

constexpr int64_t kGroupsAThread = 4096;  // a thread is not worth starting for less

}  // namespace

extern "C" int shoal_quantise(int from, const void *values, int64_t groups, int to, uint8_t *blocks, int threads) {
    const Quantise run = quantise_between(from, to);
    if (!run) return -1;
    const auto *bytes = static_cast<const uint8_t *>(values);
    const int64_t parts = std::clamp<int64_t>(groups / kGroupsAThread, 1, std::max(threads, 1));
    std::atomic<bool> fits{true};
    const auto part = [&](int64_t i) {
        if (!run(bytes, groups * i / parts, groups * (i + 1) / parts, blocks)) fits = false;
    };
    std::vector<std::thread> others;
    int64_t left = parts;  // what no other thread has is the caller's
    try {
        while (left > 1) {
            others.emplace_back(part, left - 1);
            --left;
        }
    } catch (const std::exception &) {
    }
    while (left > 0) part(--left);
    for (std::thread &other : others) other.join();
    return fits ? 0 : 1;
}
