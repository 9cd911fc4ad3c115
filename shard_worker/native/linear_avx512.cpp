#if defined(__AVX512F__)
#include "linear_codes_bf16.h"
#endif
#include "linear_matrix.h"

#ifdef SHOAL_HAS_AVX512
namespace {

shoal::Kernels best_kernels() {
    shoal::Kernels table = shoal::kernels<shoal::Avx512Lanes>("avx512");
#ifdef SHOAL_HAS_AVX512_BF16
    auto &bf16 = table.by_format[SHOAL_BF16];
    if (!__builtin_cpu_supports("avx512bf16")) return table;
    bf16.run_bf16 = bf16.run_int8 = shoal::run_bf16;
    table.by_format[SHOAL_Q8_0].run_bf16 = shoal::run_codes_bf16<shoal::Q8_0Panel>;
    table.by_format[SHOAL_Q4_0].run_bf16 = shoal::run_codes_bf16<shoal::Q4_0Panel>;
    table.by_format[SHOAL_Q4_1].run_bf16 = shoal::run_codes_bf16<shoal::Q4_1Panel>;
    table.by_format[SHOAL_Q5_0].run_bf16 = shoal::run_codes_bf16<shoal::Q5_0Panel>;
    table.by_format[SHOAL_Q4_K].run_bf16 = shoal::run_codes_bf16<shoal::Q4KPanel>;
    table.by_format[SHOAL_Q6_K].run_bf16 = shoal::run_codes_bf16<shoal::Q6KPanel>;
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
