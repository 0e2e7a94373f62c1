// Parts of vectors, and vectors whose lanes change places.
#pragma once
#include <memory>
#ifdef __AVX512F__
#include <immintrin.h>
#endif
#include "products.h"

namespace {

typedef std::unique_ptr<float[]> Space;
inline Space space(long floats) { return Space(new float[floats]); }  // not zeroed

// The next pixels of a line, of which n are left, and zeros behind them.
inline V some(const float* from, int n) {
#ifdef __AVX512F__
    if (n < LANES) return n > 0 ? (V)_mm512_maskz_loadu_ps((1 << n) - 1, from) : V{};
#else
    if (n < LANES) {
        V found = {};
        for (int i = 0; i < n; ++i) found[i] = from[i];
        return found;
    }
#endif
    return load(from);
}

inline void put_some(float* to, V x, int n) {
    if (n >= LANES) return store(to, x);
#ifdef __AVX512F__
    if (n > 0) _mm512_mask_storeu_ps(to, (1 << n) - 1, (__m512)x);
#else
    for (int i = 0; i < n; ++i) to[i] = x[i];
#endif
}

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

}  // namespace
