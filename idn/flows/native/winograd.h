// 3x3 convolutions of a few images, zero beyond their edges, and their transposes; and the slope of u^T W v over W.
//
// By Winograd's F(2x2, 3x3): tiles of 2x2 pixels, each with a margin of one, the weight, and what comes out are turned
// into 16 numbers, of which each is multiplied with its own kind alone, 16 products where there would be 36:
//
//     out = A^T [(G w G^T) (B^T in B)] A.
//
// The sum of out times u is one of (A u A^T) (G w G^T) (B^T in B), which gives the slope. The weight that is turned
// around has the same 16 numbers in another order. Lanes are tiles, so that the weight is read in any order.
#pragma once
#include "lanes.h"

namespace {

constexpr int TURNED = 4, NUMBERS = TURNED * TURNED, BLOCK = PANEL * LANES;  // tiles whose numbers stay in the cache

struct Shape {
    int outputs, inputs, height, width, threads;
    long put_in() const { return (long)inputs * height * width; }
    long put_out() const { return (long)outputs * height * width; }
    int down() const { return (height + 1) / 2; }  // rows of tiles
    int right() const { return (width + 1) / 2; }
};

template <class X>
inline void turn_in(X a, X b, X c, X d, X* to, int step) {  // B^T
    to[0] = a - c, to[step] = b + c, to[2 * step] = c - b, to[3 * step] = b - d;
}

template <class X>
inline void turn_u(X a, X b, X* to, int step) {  // A
    to[0] = a, to[step] = a + b, to[2 * step] = a - b, to[3 * step] = -b;
}

template <class X>
inline void turn_out(X a, X b, X c, X d, X* to, int step) {  // A^T
    to[0] = a + b + c, to[step] = b - c - d;
}

// A line of pixels as those that come first in a tile and those that come second; the latter start one tile early.
struct Line {
    std::vector<float> first, second;
    explicit Line(int tiles) : first(up(tiles, LANES) + LANES), second(first) {}

    void fill(const float* pixels, int width) {  // zeros if they are not within the image
        if (!pixels) return std::fill(first.begin(), first.end(), 0.0f), std::fill(second.begin(), second.end(), 0.0f);
        for (int x = 0; x < width; x += 2 * LANES) {
            V low = some(pixels + x, width - x), high = some(pixels + x + LANES, width - x - LANES);
            store(&first[x / 2], every_second(low, high, 0)), store(&second[x / 2 + 1], every_second(low, high, 1));
        }
    }
};

// The numbers of a channel's tiles, row by row; each is `apart` from the next.
struct Entering {
    const Shape& s;
    std::vector<Line> lines;

    explicit Entering(const Shape& s) : s(s), lines(TURNED, Line(s.right())) {}

    Line& line(int y) { return lines[(y + TURNED) % TURNED]; }
    void fill(const float* image, int y) {
        line(y).fill(y >= 0 && y < s.height ? image + (long)y * s.width : nullptr, s.width);
    }

    // With a margin. Rows come one after the other; `fresh` if it is not so.
    void row(const float* image, int row, bool fresh, float* to, long apart) {
        const int y = 2 * row;
        if (fresh) fill(image, y - 1), fill(image, y);
        fill(image, y + 1), fill(image, y + 2);
        for (int x = 0; x < s.right(); x += LANES) {
            V half[NUMBERS], all[NUMBERS];
#pragma GCC unroll 4
            for (int i = 0; i < TURNED; ++i) {
                const Line& from = line(y - 1 + i);
                const float *first = &from.first[x], *second = &from.second[x];
                turn_in(load(second), load(first), load(second + 1), load(first + 1), half + TURNED * i, 1);
            }
#pragma GCC unroll 4
            for (int j = 0; j < TURNED; ++j)
                turn_in(half[j], half[TURNED + j], half[2 * TURNED + j], half[3 * TURNED + j], all + j, TURNED);
#pragma GCC unroll 16
            for (int k = 0; k < NUMBERS; ++k) store(to + k * apart + x, all[k]);
        }
    }

    // Of u, without one.
    void row_of_u(const float* image, int row, float* to, long apart) {
        const int y = 2 * row;
        fill(image, y), fill(image, y + 1);
        for (int x = 0; x < s.right(); x += LANES) {
            V half[2 * TURNED], all[NUMBERS];
#pragma GCC unroll 2
            for (int i = 0; i < 2; ++i) {
                const Line& from = line(y + i);
                turn_u(load(&from.first[x]), load(&from.second[x + 1]), half + TURNED * i, 1);
            }
#pragma GCC unroll 4
            for (int j = 0; j < TURNED; ++j) turn_u(half[j], half[TURNED + j], all + j, TURNED);
#pragma GCC unroll 16
            for (int k = 0; k < NUMBERS; ++k) store(to + k * apart + x, all[k]);
        }
    }
};

// A row of tiles -> two lines of pixels.
inline void leave_row(const Shape& s, const float* from, long apart, int row, float* image) {
    for (int x = 0; x < s.right(); x += LANES) {
        V half[2 * TURNED], pixels[4];
#pragma GCC unroll 4
        for (int j = 0; j < TURNED; ++j) {
            auto number = [&](int i) { return load(from + (TURNED * i + j) * apart + x); };
            turn_out(number(0), number(1), number(2), number(3), half + j, TURNED);
        }
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) {
            const V* h = half + TURNED * i;
            turn_out(h[0], h[1], h[2], h[3], pixels + 2 * i, 1);
        }
        I low;
        for (int l = 0; l < LANES; ++l) low[l] = l / 2 + l % 2 * LANES;
        for (int i = 0; i < std::min(2, s.height - 2 * row); ++i) {
            float* to = image + (long)(2 * row + i) * s.width + 2 * x;
            put_some(to, __builtin_shuffle(pixels[2 * i], pixels[2 * i + 1], low), s.width - 2 * x);
            const V high = __builtin_shuffle(pixels[2 * i], pixels[2 * i + 1], low + LANES / 2);
            put_some(to + LANES, high, s.width - 2 * x - LANES);
        }
    }
}

// What a row of tiles is stored to may be written a part of a vector further.
long room(const Shape& s, int rows) { return up(rows * s.right(), LANES) + (s.right() % LANES ? LANES : 0); }

// A weight, times a factor, as 16 matrices.
struct Turned {
    const Shape& s;
    int row;
    long size;
    Space numbers;

    Turned(const Shape& s, const float* weight, float scale)
        : s(s), row(row_length(s.inputs)), size((long)s.outputs * row), numbers(space(NUMBERS * size)) {
#pragma omp parallel for num_threads(s.threads) schedule(static)
        for (int o = 0; o < s.outputs; ++o)
            for (int i = 0; i < s.inputs; ++i) {
                const float* w = weight + ((long)o * s.inputs + i) * 9;
                float half[12], *to = &numbers[o * (long)row + i];
                for (int x = 0; x < 3; ++x) turn(scale * w[x], scale * w[3 + x], scale * w[6 + x], half + x, 3);
                for (int y = 0; y < TURNED; ++y) {
                    const float* h = half + 3 * y;
                    turn(h[0], h[1], h[2], to + y * TURNED * size, size);
                }
            }
    }

    static void turn(float a, float b, float c, float* to, long step) {  // G
        float ends = (a + c) / 2, middle = b / 2;
        to[0] = a, to[step] = ends + middle, to[2 * step] = ends - middle, to[3 * step] = c;
    }

    // W x for some images x, or W^T x.
    void products(bool transposed, int images, const float* const* x, float* const* out) const {
        const int channels = transposed ? s.outputs : s.inputs, rows = transposed ? s.inputs : s.outputs;
        const int all = images * s.down(), some = std::max(1, BLOCK / s.right());
        const long pixels = (long)s.height * s.width, wide = room(s, some);
        // Threads of their own would take it from heaps of their own.
        const long entering_size = NUMBERS * channels * wide, leaving_size = NUMBERS * rows * wide;
        const Space all_entered = space(s.threads * entering_size), all_left = space(s.threads * leaving_size);
#pragma omp parallel for num_threads(s.threads) schedule(static, 1)
        for (int slot = 0; slot < s.threads; ++slot) {
            const int end = all * (slot + 1) / s.threads;
            float *entered = &all_entered[slot * entering_size], *left = &all_left[slot * leaving_size];
            Entering entering(s);
            for (int start = all * slot / s.threads; start < end; start += some) {
                const int count = std::min(some, end - start);
                for (int c = 0; c < channels; ++c)
                    for (int r = start; r < start + count; ++r)
                        entering.row(x[r / s.down()] + c * pixels, r % s.down(), r == start || r % s.down() == 0,
                                     &entered[c * wide + (r - start) * s.right()], channels * wide);
                for (int k = 0; k < NUMBERS; ++k) {
                    // Turned around, first and last are exchanged in both directions.
                    auto around = [&](int i) { return transposed && i % 3 == 0 ? 3 - i : i; };
                    const float* weight = &numbers[(around(k / TURNED) * TURNED + around(k % TURNED)) * size];
                    Left factor = {weight, transposed ? 4 : 4L * row, transposed ? 4L * row : 4};
                    product<Full>(factor, &entered[k * channels * wide], wide, channels, rows, count * s.right(),
                                  &left[k * rows * wide], wide, false);
                }
                for (int c = 0; c < rows; ++c)
                    for (int r = start; r < start + count; ++r)
                        leave_row(s, &left[c * wide + (r - start) * s.right()], rows * wide, r % s.down(),
                                  out[r / s.down()] + c * pixels);
            }
        }
    }
};

// The sum over pixels of u, outputs x pixels, times the pixels of v that each tap sees, for inputs and taps.
void slope(const Shape& s, const float* u, const float* v, float* out) {
    const int tiles = s.down() * s.right(), row = row_length(s.inputs);
    const long pixels = (long)s.height * s.width, wide = room(s, s.down()), size = (long)s.outputs * row;
    const Space put_out = space(NUMBERS * s.outputs * wide), put_in = space((long)NUMBERS * tiles * row);
    const Space found = space(NUMBERS * size);
#pragma omp parallel num_threads(s.threads)
    {
        Entering entering(s);
#pragma omp for schedule(static)
        for (int o = 0; o < s.outputs; ++o)
            for (int r = 0; r < s.down(); ++r)
                entering.row_of_u(u + o * pixels, r, &put_out[o * wide + r * s.right()], s.outputs * wide);
        // Tiles of v are added up, so lanes are channels.
        const Space own = space(NUMBERS * LANES * wide + LANES);
#pragma omp for schedule(static)
        for (int from = 0; from < s.inputs; from += LANES) {
            const int count = std::min(LANES, s.inputs - from);
            for (int c = 0; c < count; ++c)
                for (int r = 0; r < s.down(); ++r)
                    entering.row(v + (from + c) * pixels, r, r == 0, &own[c * wide + r * s.right()], LANES * wide);
            for (int k = 0; k < NUMBERS; ++k)
                for (int t = 0; t < tiles; t += LANES) {
                    V x[LANES];
                    for (int c = 0; c < LANES; ++c) x[c] = load(&own[(k * LANES + c) * wide + t]);
                    transpose(x);
                    float* to = &put_in[((long)k * tiles + t) * row + from];
                    for (int i = 0; i < std::min(LANES, tiles - t); ++i) store(to + (long)i * row, x[i]);
                }
        }
#pragma omp for schedule(static)
        for (int k = 0; k < NUMBERS; ++k)
            product<Full>({&put_out[k * s.outputs * wide], 4 * wide, 4}, &put_in[(long)k * tiles * row], row, tiles,
                          s.outputs, s.inputs, &found[k * size], row, false);
        auto turn = [](float a, float b, float c, float d, float* to, int step) {  // G^T
            float ends = (b + c) / 2;
            to[0] = a + ends, to[step] = (b - c) / 2, to[2 * step] = ends + d;
        };
#pragma omp for schedule(static)
        for (int o = 0; o < s.outputs; ++o)
            for (int i = 0; i < s.inputs; ++i) {
                const float* from = &found[o * (long)row + i];
                float half[12], *to = out + ((long)o * s.inputs + i) * 9;
                for (int x = 0; x < TURNED; ++x) {
                    const float* own = from + x * size;
                    turn(own[0], own[TURNED * size], own[2 * TURNED * size], own[3 * TURNED * size], half + x, TURNED);
                }
                for (int y = 0; y < 3; ++y) {
                    const float* h = half + TURNED * y;
                    turn(h[0], h[1], h[2], h[3], to + 3 * y, 1);
                }
            }
    }
}

}  // namespace
