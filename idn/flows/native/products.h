// Vectors of floats, and products of matrices that fit into the cache.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

#ifdef __AVX512F__
constexpr int LANES = 16, ROWS = 8;
#else
constexpr int LANES = 8, ROWS = 4;
#endif
constexpr int PANEL = 3, TILE = 32, POINTS = 8;  // vectors of a product's block; points of a tile, and their multiple
constexpr int NONE = 0, LIPSWISH = 1, CLIPSWISH = 2;
typedef float V __attribute__((vector_size(4 * LANES)));
typedef float Unaligned __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t I __attribute__((vector_size(4 * LANES)));

int up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }
// The length of a row that holds n floats: an odd number of vectors, so that rows do not share their cache sets.
int row_length(int n) { return up(n, LANES) + (up(n, LANES) / LANES % 2 ? 0 : LANES); }
inline V load(const float* p) { return *(const Unaligned*)p; }
inline void store(float* p, V x) { *(Unaligned*)p = x; }
// The next numbers of a row, of which n are left, and zeros behind them.
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

inline V all(float x) { return V{} + x; }

inline float total(V x) {
    I lane;
    for (int i = 0; i < LANES; ++i) lane[i] = i;
    for (int step = LANES / 2; step; step /= 2) x += __builtin_shuffle(x, lane ^ step);
    return x[0];
}

float dot(const float* a, const float* b, int n) {
    V sum = {};
    int i = 0;
    for (; i + LANES <= n; i += LANES) sum += load(a + i) * load(b + i);
    float rest = total(sum);
    for (; i < n; ++i) rest += a[i] * b[i];
    return rest;
}

// exp(x) to 2e-7, for |x| <= 87: 2^n exp(f) with |f| <= ln(2) / 2.
inline V exponential(V x) {
#ifdef __AVX512F__
    x = (V)_mm512_min_ps((__m512)all(87.0f), _mm512_max_ps((__m512)all(-87.0f), (__m512)x));
    V n = (V)_mm512_roundscale_ps((__m512)(x * 1.44269504f), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    x = x < -87.0f ? all(-87.0f) : x;
    x = x > 87.0f ? all(87.0f) : x;
    I k = __builtin_convertvector(x * 1.44269504f + 128.5f, I) - 128;
    V n = __builtin_convertvector(k, V);
#endif
    V f = x - n * 0.693359375f + n * 2.12194440e-4f;
    V e = all(8.2902722e-3f);
    for (float share : {4.1898161e-2f, 0.16667639f, 0.49999148f, 0.9999997f, 1.0f}) e = share + f * e;
#ifdef __AVX512F__
    return (V)_mm512_scalef_ps((__m512)e, (__m512)n);
#else
    return e * (V)((k + 127) << 23);
#endif
}

// 1 / x to the last bit or two: an estimate and one step of Newton's method take less than half the time of a division.
inline V reciprocal(V x) {
#ifdef __AVX512F__
    V r = (V)_mm512_rcp14_ps((__m512)x);
    return r * (2 - x * r);
#else
    return 1 / x;
#endif
}

// What is stored as a number (Low: bf16) and multiplied as a word (Low: a pair of them).
struct Full {
    typedef float Number;
    static constexpr int PER_WORD = 1;
    static V get(const float* p) { return load(p); }
    static void put(float* p, V x) { store(p, x); }
    static void put_pair(float* p, int stride, V x, V y, int n) { put_some(p, x, n), put_some(p + stride, y, n); }
    static float rounded(float x) { return x; }
    static V rounded(V x) { return x; }
    static float number(float x) { return x; }
    static V broadcast(const char* p) { return all(*(const float*)p); }
    static V times(V sum, V a, V b) { return sum + a * b; }
};

#ifdef __AVX512BF16__
struct Low {
    typedef uint16_t Number;
    static constexpr int PER_WORD = 2;
    static V wide(__m256i x) { return (V)_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16); }
    static __m256i narrow(V x) { return (__m256i)_mm512_cvtneps_pbh((__m512)x); }
    static V get(const Number* p) { return wide(_mm256_loadu_si256((const __m256i*)p)); }
    static void put(Number* p, V x) { _mm256_storeu_si256((__m256i*)p, narrow(x)); }
    static void put_pair(Number* p, int, V x, V y, int n) {
        I turns;
        for (int i = 0; i < LANES; ++i) turns[i] = i | (LANES + i) << 16;
        __m512i one_after_other = (__m512i)_mm512_cvtne2ps_pbh((__m512)y, (__m512)x);
        put_some((float*)p, (V)_mm512_permutexvar_epi16((__m512i)turns, one_after_other), n);
    }
    static V rounded(V x) { return wide(narrow(x)); }
    static float rounded(float x) { return rounded(all(x))[0]; }
    static Number number(float x) {  // of what is rounded already
        uint32_t bits;
        memcpy(&bits, &x, 4);
        return bits >> 16;
    }
    static V broadcast(const char* p) {
        int32_t word;
        memcpy(&word, p, 4);
        return (V)_mm512_set1_epi32(word);
    }
    static V times(V sum, V a, V b) { return (V)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b); }
};
#endif

// A matrix of words as the first factor: one step down and one along the sum, in bytes.
struct Left {
    const void* words;
    long down, along;
};

template <class T, int M, int N>
inline void block(Left left, const float* b, long width, int sum, float* c, long stride, bool add) {
    const char* a = (const char*)left.words;
    V acc[M][N];
#pragma GCC unroll 9
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 3
        for (int v = 0; v < N; ++v) acc[i][v] = add ? load(c + i * stride + v * LANES) : V{};
    for (; sum; --sum, a += left.along, b += width) {
        V w[N];
#pragma GCC unroll 3
        for (int v = 0; v < N; ++v) w[v] = load(b + v * LANES);
#pragma GCC unroll 9
        for (int i = 0; i < M; ++i) {
            V x = T::broadcast(a + i * left.down);
#pragma GCC unroll 3
            for (int v = 0; v < N; ++v) acc[i][v] = T::times(acc[i][v], w[v], x);
        }
    }
#pragma GCC unroll 9
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 3
        for (int v = 0; v < N; ++v) store(c + i * stride + v * LANES, acc[i][v]);
}

template <class T, int N>
void panel(Left a, const float* b, long width, int sum, int rows, float* c, long stride, bool add) {
    int i = 0;
    auto blocks = [&](auto size, int most) {
        for (; most && i + size <= rows; i += size, --most) {
            Left from = {(const char*)a.words + i * a.down, a.down, a.along};
            block<T, size, N>(from, b, width, sum, c + i * stride, stride, add);
        }
    };
    // Few rows left over would take as long as many: blocks with one row more leave none.
    const int over = LANES == 16 ? rows % ROWS : 0;  // where there are registers for it
    blocks(std::integral_constant<int, ROWS + 1>(), over * (ROWS + 1) <= rows ? over : 0);
    blocks(std::integral_constant<int, ROWS>(), rows);
    blocks(std::integral_constant<int, 4>(), rows);
    blocks(std::integral_constant<int, 2>(), rows);
    blocks(std::integral_constant<int, 1>(), rows);
}

// c (+)= a b for a b of `sum` rows of words; whole vectors of columns.
template <class T>
void product(Left a, const float* b, long width, int sum, int rows, int columns, float* c, long stride, bool add) {
    int vectors = up(columns, LANES) / LANES, v = 0;
    for (; v + PANEL <= vectors; v += PANEL)
        panel<T, PANEL>(a, b + v * LANES, width, sum, rows, c + v * LANES, stride, add);
    if (vectors - v == 2) panel<T, 2>(a, b + v * LANES, width, sum, rows, c + v * LANES, stride, add);
    if (vectors - v == 1) panel<T, 1>(a, b + v * LANES, width, sum, rows, c + v * LANES, stride, add);
}

// Two columns of a product whose second factor is stored by columns.
template <class T>
void two_columns(const char* a, long down, const float* b, int words, int rows, float* c, int stride) {
    for (int r = 0; r < rows; ++r, a += down, c += stride) {
        V first = {}, second = {};
        for (int i = 0; i < words; i += LANES) {
            V x = load((const float*)a + i);
            first = T::times(first, x, load(b + i)), second = T::times(second, x, load(b + words + i));
        }
        c[0] = total(first), c[1] = total(second);
    }
}

}  // namespace
