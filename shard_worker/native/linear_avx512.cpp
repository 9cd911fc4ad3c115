#if defined(__AVX512F__)
#include "linear_bf16.h"
#endif
#include "linear_matrix.h"

#ifdef SHOAL_HAS_AVX512
namespace {

shoal::Kernels best_kernels() {
    shoal::Kernels table = shoal::kernels<shoal::Avx512Lanes>("avx512");
#ifdef SHOAL_HAS_AVX512_BF16
    auto &bf16 = table.by_format[SHOAL_BF16];
    if (__builtin_cpu_supports("avx512bf16")) bf16.run_bf16 = bf16.run_int8 = shoal::run_bf16;
#endif
    return table;
}

}  // namespace
#endif

const shoal::Kernels *shoal::avx512_kernels() {
#ifdef SHOAL_HAS_AVX512
    const bool here = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vnni");
    if (!here) return nullptr;
    static const Kernels table = best_kernels();
    return &table;
#else
    return nullptr;
#endif
}
