// What a step's time goes to.
#pragma once

#include <chrono>
#include <cstdint>

#include "stage.h"

namespace shoal {

// Wall time of one thread, phase by phase.
class Clock {
public:
    explicit Clock(int64_t *ns) : ns_(ns) { last_ = now(); }

    void spent(shoal_phase phase) {
        if (!ns_) return;
        const int64_t at = now();
        ns_[phase] += at - last_;
        last_ = at;
    }

private:
    static int64_t now() {
        return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
            .count();
    }
    int64_t *ns_, last_;
};

}  // namespace shoal
