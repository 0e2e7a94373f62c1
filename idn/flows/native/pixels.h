// Products of images that lie in planes: for each pixel LANES words of channels, within a margin of zeros, so that a
// step to the next pixel is a constant and all pixels of a plane lie side by side.
#pragma once
#include "products.h"

namespace {

constexpr int PIXELS = 8, VECTORS = 2, COLUMNS = VECTORS * LANES;  // a block that stays in registers while it is summed
constexpr int TAPS = 9, CENTRE = 4;

inline void put(float* to, V x, int lanes) {
    if (lanes >= LANES) return store(to, x);
    std::memcpy(to, &x, lanes * sizeof(float));
}

// Words of two numbers: one of each vector.
template <class T>
inline V paired(V x, V y) {
#ifdef __AVX512BF16__
    if constexpr (T::PER_WORD == 2) {
        __m512i low = _mm512_cvtepu16_epi32(T::narrow(x)), high = _mm512_cvtepu16_epi32(T::narrow(y));
        return (V)_mm512_or_si512(low, _mm512_slli_epi32(high, 16));
    }
#endif
    return x;
}

// One of the numbers of each word.
template <class T>
inline V unpaired(V words, int number) {
    if (T::PER_WORD == 1) return words;
    return number ? (V)((I)words & ~0xffff) : (V)((I)words << 16);
}

// Where the pixels of a plane are, in floats.
struct Frame {
    int height, width;

    long plane() const { return (long)(height + 2) * (width + 2) * LANES; }
    long at(int y, int x) const { return ((long)(y + 1) * (width + 2) + x + 1) * LANES; }
    long step(int tap) const { return ((tap / 3 - 1) * (width + 2) + tap % 3 - 1) * (long)LANES; }
    long down() const { return (long)(width + 2) * LANES; }

    void clear_margin(float* planes, int count) const {
        for (; count; --count, planes += plane()) {
            std::fill_n(planes, down(), 0.0f);
            for (int y = 0; y < height; ++y) {
                std::fill_n(planes + at(y, -1), (int)LANES, 0.0f);
                std::fill_n(planes + at(y, width), (int)LANES, 0.0f);
            }
            std::fill_n(planes + at(height, -1), down(), 0.0f);
        }
    }
};

// Calls each(size, i) for blocks of `count` things, as large as can be.
template <class Each>
inline void in_blocks(int count, Each each) {
    int i = 0;
    for (; i + PIXELS <= count; i += PIXELS) each(std::integral_constant<int, PIXELS>(), i);
    if (i + 4 <= count) each(std::integral_constant<int, 4>(), i), i += 4;
    if (i + 2 <= count) each(std::integral_constant<int, 2>(), i), i += 2;
    if (i < count) each(std::integral_constant<int, 1>(), i);
}

// Words of the first factor that lie side by side: where they start, in floats from the pixel, and how many there are.
struct Stretch {
    long start;
    int words;
};

template <class T, int M, int N>
inline void add_word(V (&sum)[M][N], const float* a, const float* b) {
    V w[N];
#pragma GCC unroll 2
    for (int v = 0; v < N; ++v) w[v] = load(b + v * LANES);
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i) {
        V x = T::broadcast((const char*)(a + i * LANES));
#pragma GCC unroll 2
        for (int v = 0; v < N; ++v) sum[i][v] = T::times(sum[i][v], w[v], x);
    }
}

// c = a b for M pixels side by side times N vectors of columns: the words of all stretches against rows of b.
template <class T, int M, int N>
inline void convolve(const float* a, const std::vector<Stretch>& stretches, const float* b, float* c) {
    V sum[M][N] = {};
    for (const Stretch& stretch : stretches) {
        const float* from = a + stretch.start;
        if (stretch.words == LANES)
            for (int k = 0; k < LANES; ++k, b += N * LANES) add_word<T>(sum, from + k, b);
        else
            for (int k = 0; k < stretch.words; ++k, b += N * LANES) add_word<T>(sum, from + k, b);
    }
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 2
        for (int v = 0; v < N; ++v) store(c + (i * N + v) * LANES, sum[i][v]);
}

// c += a^T b for M words of a and N planes of b, summed over the pixels of some lines.
template <class T, int M, int N>
inline void correlate(const float* a, const float* b, const Frame& frame, int lines, float* c, long stride) {
    const long plane = frame.plane(), down = frame.down();
    V sum[M][N];
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 2
        for (int v = 0; v < N; ++v) sum[i][v] = load(c + i * stride + v * LANES);
    for (int y = 0; y < lines; ++y, a += down, b += down) {
        const float *from = a, *with = b;
        for (int x = frame.width; x; --x, from += LANES, with += LANES) {
            V w[N];
#pragma GCC unroll 2
            for (int v = 0; v < N; ++v) w[v] = load(with + v * plane);
#pragma GCC unroll 8
            for (int i = 0; i < M; ++i) {
                V word = T::broadcast((const char*)(from + i));
#pragma GCC unroll 2
                for (int v = 0; v < N; ++v) sum[i][v] = T::times(sum[i][v], w[v], word);
            }
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 2
        for (int v = 0; v < N; ++v) store(c + i * stride + v * LANES, sum[i][v]);
}

}  // namespace
