#if defined(__AVX512F__)
#include "linear_kernels.h"
#endif
#include "linear_matrix.h"

const shoal::Kernels *shoal::avx512_kernels() {
#ifdef SHOAL_HAS_AVX512
    static constexpr Kernels table = kernels<Avx512Lanes>("avx512");
    const bool here = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vnni");
    return here ? &table : nullptr;
#else
    return nullptr;
#endif
}
