// Space for vectors, and vectors whose lanes change places.
#pragma once
#include <memory>
#ifdef __AVX512F__
#include <immintrin.h>
#endif
#include "products.h"

namespace {

typedef std::unique_ptr<float[]> Space;
inline Space space(long floats) { return Space(new float[floats]); }  // not zeroed

// Every second lane of two vectors, from 0 or 1 on.
inline V every_second(V a, V b, int from) {
    I lane;
    for (int l = 0; l < LANES; ++l) lane[l] = 2 * l;
    return __builtin_shuffle(a, b, lane + from);
}

// As many vectors as they have lanes.
template <int APART = 1>
inline void transpose(V* x) {
    I low, high;
    for (int l = 0; l < LANES; ++l) low[l] = l & APART ? l - APART + LANES : l, high[l] = low[l] + APART;
    for (int i = 0; i < LANES; ++i)
        if (!(i & APART)) {
            V a = x[i], b = x[i + APART];
            x[i] = __builtin_shuffle(a, b, low), x[i + APART] = __builtin_shuffle(a, b, high);
        }
    if constexpr (2 * APART < LANES) transpose<2 * APART>(x);
}

// As many columns of a matrix as there are lanes, in vectors over as many rows; zeros behind its ends.
inline void turned(const float* from, long stride, int rows, int columns, V* to) {
    for (int r = 0; r < LANES; ++r) to[r] = r < rows ? some(from + r * stride, columns) : V{};
    transpose(to);
}

}  // namespace
