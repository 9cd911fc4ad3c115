#include "linear_kernels.h"

const shoal::Kernels *shoal::avx2_kernels() {
#ifdef SHOAL_HAS_AVX2
    static constexpr Kernels table = kernels<Avx2Lanes>("avx2");
    const bool here = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    return here ? &table : nullptr;
#else
    return nullptr;
#endif
}
