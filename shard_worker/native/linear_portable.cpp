#define SHOAL_PORTABLE_ONLY
#include "linear_kernels.h"

const shoal::Kernels *shoal::portable_kernels() {
    static constexpr Kernels table = kernels<PortableLanes>("portable");
    return &table;
}
