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

inline V exponential(V x) {
    x = x < -87.0f ? all(-87.0f) : x;
    x = x > 87.0f ? all(87.0f) : x;
    I k = __builtin_convertvector(x * 1.44269504f + 128.5f, I) - 128;
    V n = __builtin_convertvector(k, V), f = x - n * 0.693359375f + n * 2.12194440e-4f;
    V e = all(1.0f / 720);
    for (float share : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) e = share + f * e;
    return e * (V)((k + 127) << 23);
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
    static void put_pair(float* p, int stride, V x, V y) { store(p, x), store(p + stride, y); }
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
    static void put_pair(Number* p, int, V x, V y) {
        __m512i low = _mm512_cvtepu16_epi32(narrow(x)), high = _mm512_cvtepu16_epi32(narrow(y));
        _mm512_storeu_si512(p, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
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
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 3
        for (int v = 0; v < N; ++v) acc[i][v] = add ? load(c + i * stride + v * LANES) : V{};
    for (; sum; --sum, a += left.along, b += width) {
        V w[N];
#pragma GCC unroll 3
        for (int v = 0; v < N; ++v) w[v] = load(b + v * LANES);
#pragma GCC unroll 8
        for (int i = 0; i < M; ++i) {
            V x = T::broadcast(a + i * left.down);
#pragma GCC unroll 3
            for (int v = 0; v < N; ++v) acc[i][v] = T::times(acc[i][v], w[v], x);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 3
        for (int v = 0; v < N; ++v) store(c + i * stride + v * LANES, acc[i][v]);
}

template <class T, int N>
void panel(Left a, const float* b, long width, int sum, int rows, float* c, long stride, bool add) {
    int i = 0;
    auto blocks = [&](auto size) {
        for (; i + size <= rows; i += size) {
            Left from = {(const char*)a.words + i * a.down, a.down, a.along};
            block<T, size, N>(from, b, width, sum, c + i * stride, stride, add);
        }
    };
    blocks(std::integral_constant<int, ROWS>());
    blocks(std::integral_constant<int, 4>());
    blocks(std::integral_constant<int, 2>());
    blocks(std::integral_constant<int, 1>());
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
