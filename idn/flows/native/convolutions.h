// Convolutions of a few images, zero beyond their edges, and their transposes; and the slope of u^T W v over W.
//
// Lanes are pixels, so that weights are read as they stand. Lines of pixels stand one behind the other in a plane per
// channel, with zeros between them: what lies beyond an edge is a step away in any direction. Sums are made there, too,
// and left behind.
#pragma once
#include "products.h"

namespace {

constexpr int CACHED = 1 << 16;  // weights that are gone through at a time

// Zeros that start where a line of the cache does, as all planes do: loads from two lines take twice as long.
struct Zeros {
    std::vector<float> memory;
    float* start;
    explicit Zeros(size_t size) : memory(size + LANES), start((float*)(((uintptr_t)memory.data() + 4 * LANES - 1) / (4 * LANES) * (4 * LANES))) {}
};

struct Planes {
    int images, height, width, kernel, radius, pitch, margin;
    long positions, size;  // from the first pixel to the last one; of a plane, with what is read around them

    Planes(int images, int height, int width, int kernel)
        : images(images), height(height), width(width), kernel(kernel), radius(kernel / 2), pitch(width + radius),
          margin(up(radius * pitch + radius, LANES)), positions((long)(images * (height + radius) - radius) * pitch),
          size(up(positions + 2 * margin, LANES) + PANEL * LANES) {}

    long line(int image, int y) const { return (long)(image * (height + radius) + y) * pitch; }
    long step(int tap) const { return (tap / kernel - radius) * (long)pitch + tap % kernel - radius; }

    template <class Each>
    void each_line(int channels, int threads, Each each) const {
#pragma omp parallel for num_threads(threads) schedule(static)
        for (int c = 0; c < channels; ++c)
            for (int i = 0; i < images; ++i)
                for (int y = 0; y < height; ++y) each(i, (c * height + y) * (long)width, c * size + margin + line(i, y));
    }

    // The pixels of some images, channels x height x width, to a plane for each channel.
    Zeros enter(const float* const* x, int channels, float factor, int threads) const {
        Zeros planes(channels * size);
        each_line(channels, threads, [&](int image, long from, long to) {
            for (int p = 0; p < width; ++p) planes.start[to + p] = factor * x[image][from + p];
        });
        return planes;
    }

    void leave(const Zeros& planes, int channels, float factor, float* const* x, int threads) const {
        each_line(channels, threads, [&](int image, long to, long from) {
            for (int p = 0; p < width; ++p) x[image][to + p] = factor * planes.start[from + p];
        });
    }
};

// A sum over `count` channels, `from` apart, and taps; rows of weights are `down` apart, channels `along`.
struct Sum {
    const float *weight, *planes;
    const long* steps;
    long down, along, from;
    int count, taps;
};

// `to` += the sums of M rows at N vectors of positions.
template <int M, int N>
void add(const Sum& sum, long row, long position, float* to, long stride) {
    V acc[M][N];
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 3
        for (int v = 0; v < N; ++v) acc[m][v] = load(to + m * stride + v * LANES);
    const float *weight = sum.weight + row * sum.down, *plane = sum.planes + position;
    for (int c = 0; c < sum.count; ++c, weight += sum.along, plane += sum.from)
        for (int t = 0; t < sum.taps; ++t) {
            V x[N];
#pragma GCC unroll 3
            for (int v = 0; v < N; ++v) x[v] = load(plane + sum.steps[t] + v * LANES);
#pragma GCC unroll 8
            for (int m = 0; m < M; ++m) {
                V w = all(weight[m * sum.down + t]);
#pragma GCC unroll 3
                for (int v = 0; v < N; ++v) acc[m][v] += w * x[v];
            }
        }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 3
        for (int v = 0; v < N; ++v) store(to + m * stride + v * LANES, acc[m][v]);
}

template <int N>
void add_rows(const Sum& sum, int rows, long position, float* to, long stride) {
    int row = 0;
    auto some = [&](auto size) {
        for (; row + size <= rows; row += size) add<size, N>(sum, row, position, to + row * stride, stride);
    };
    some(std::integral_constant<int, ROWS>());
    some(std::integral_constant<int, 4>());
    some(std::integral_constant<int, 2>());
    some(std::integral_constant<int, 1>());
}

void convolve(const Planes& p, Sum sum, int channels, int rows, float* out, int threads) {
    const int block = PANEL * LANES, blocks = (p.positions + block - 1) / block;
    const int some = std::max(1, CACHED / (rows * sum.taps));
    const float *weight = sum.weight, *planes = sum.planes;
#pragma omp parallel for num_threads(threads) schedule(static) firstprivate(sum)
    for (int slot = 0; slot < threads; ++slot)
        for (int c = 0; c < channels; c += some) {
            sum.weight = weight + c * sum.along, sum.planes = planes + c * sum.from;
            sum.count = std::min(some, channels - c);
            for (int b = blocks * slot / threads; b < blocks * (slot + 1) / threads; ++b) {
                const long at = (long)b * block, left = (p.positions - at + LANES - 1) / LANES;
                float* to = out + p.margin + at;
                if (left >= PANEL) add_rows<PANEL>(sum, rows, p.margin + at, to, p.size);
                else if (left == 2) add_rows<2>(sum, rows, p.margin + at, to, p.size);
                else add_rows<1>(sum, rows, p.margin + at, to, p.size);
            }
        }
}

// Of each of M vectors the sum of its lanes: halves are added until one vector has all sums, side by side.
template <int M, int APART = LANES / 2>
inline void totals(const V* x, float* to) {
    I low;
    for (int l = 0; l < LANES; ++l) low[l] = l / (2 * APART) * 2 * APART + l % APART + (l % (2 * APART) < APART ? 0 : LANES);
    if constexpr (M > 1) {
        V halves[M / 2];
#pragma GCC unroll 4
        for (int i = 0; i < M / 2; ++i)
            halves[i] = __builtin_shuffle(x[i], x[i + M / 2], low) + __builtin_shuffle(x[i], x[i + M / 2], low + APART);
        totals<M / 2, APART / 2>(halves, to);
    } else {
        V sum = *x;
        for (int apart = APART; apart; apart /= 2) {
            I other;
            for (int l = 0; l < LANES; ++l) other[l] = l ^ apart;
            sum += __builtin_shuffle(sum, other);
        }
        for (int i = 0; i < LANES; i += 2 * APART) *to++ = sum[i];
    }
}

// The sums over all positions of M planes of u, times N of v that are a pixel apart.
template <int M, int N>
void correlate(const float* u, const float* v, long size, long positions, float* to, long stride) {
    V acc[N][M] = {};
    for (long p = 0; p < positions; p += LANES) {
        V x[N];
#pragma GCC unroll 3
        for (int n = 0; n < N; ++n) x[n] = load(v + p + n);
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
            V y = load(u + m * size + p);
#pragma GCC unroll 3
            for (int n = 0; n < N; ++n) acc[n][m] += x[n] * y;
        }
    }
#pragma GCC unroll 3
    for (int n = 0; n < N; ++n) {
        float found[M];
        totals<M>(acc[n], found);
        for (int m = 0; m < M; ++m) to[m * stride + n] = found[m];
    }
}

struct Shape {
    int outputs, inputs, kernel, height, width, threads;
    long put_in() const { return (long)inputs * height * width; }
    long put_out() const { return (long)outputs * height * width; }
};

// scale W x for some images x, or scale W^T x. The factor is shared by what enters and what leaves: neither is so large
// or so small that sums leave the range.
void products(const Shape& s, const float* weight, float scale, bool transposed, int images, const float* const* x,
              float* const* out) {
    const Planes p(images, s.height, s.width, s.kernel);
    const int taps = s.kernel * s.kernel, channels = transposed ? s.outputs : s.inputs;
    const int rows = transposed ? s.inputs : s.outputs;
    std::vector<long> steps(taps);
    for (int t = 0; t < taps; ++t) steps[t] = transposed ? -p.step(t) : p.step(t);
    const Zeros planes = p.enter(x, channels, std::sqrt(scale), s.threads), found(rows * p.size);
    const long one = taps, other = (long)s.inputs * taps;
    Sum sum = {weight, planes.start, steps.data(), transposed ? one : other, transposed ? other : one, p.size, 0, taps};
    convolve(p, sum, channels, rows, found.start, s.threads);
    p.leave(found, rows, std::sqrt(scale), out, s.threads);
}

// The sum over pixels of u, outputs x pixels, times the pixels of v that each tap sees, for inputs and taps.
void slope(const Shape& s, const float* u, const float* v, float* out) {
    const int taps = s.kernel * s.kernel;
    const Planes p(1, s.height, s.width, s.kernel);
    const Zeros put_out = p.enter(&u, s.outputs, 1, s.threads), put_in = p.enter(&v, s.inputs, 1, s.threads);
    const long stride = (long)s.inputs * taps;
    auto rows = [&](auto size, int row) {
        const float* from = put_out.start + row * p.size + p.margin;
        for (int c = 0; c < s.inputs; ++c)
            for (int t = 0; t < taps;) {
                const float* with = put_in.start + c * p.size + p.margin + p.step(t);
                float* to = out + row * stride + c * taps + t;
                const bool three = t % s.kernel + 3 <= s.kernel;
                if (three) correlate<size, 3>(from, with, p.size, p.positions, to, stride);
                else correlate<size, 1>(from, with, p.size, p.positions, to, stride);
                t += three ? 3 : 1;
            }
    };
#pragma omp parallel for num_threads(s.threads) schedule(dynamic)
    for (int row = 0; row < s.outputs; row += ROWS) {
        int r = row, end = std::min(s.outputs, row + ROWS);
        if (r + ROWS <= end) rows(std::integral_constant<int, ROWS>(), r), r += ROWS;
        for (; r + 4 <= end; r += 4) rows(std::integral_constant<int, 4>(), r);
        for (; r < end; ++r) rows(std::integral_constant<int, 1>(), r);
    }
}

}  // namespace
