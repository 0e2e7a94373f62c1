// A kernel's taps at any frequencies: K(f) = sum_t K_t exp(i f.t), and waves that fade towards the edges of an image.
#pragma once
#include <complex>
#include "products.h"

namespace {

// K(f) is n x m, n being the smaller of a kernel's two sides. Taps t and -t are kept as their sum and their difference,
// K_t + K_-t and K_t - K_-t, of which K(f) takes cos(f.t) and i sin(f.t): first the tap in the middle, then all sums,
// then all differences. Vectors of channels are padded; a complex one is its real and then its imaginary part.
struct Taps {
    int n, m, kernel, taps, pairs;
    bool wide;
    int n_row, m_row;
    size_t size;
    std::vector<float> numbers;

    Taps(const float* weight, float scale, int outputs, int inputs, int kernel, int threads)
        : n(std::min(outputs, inputs)), m(std::max(outputs, inputs)), kernel(kernel), taps(kernel * kernel),
          pairs(taps / 2), wide(outputs <= inputs), n_row(up(n, LANES)), m_row(row_length(m)), size((size_t)n * m_row),
          numbers(taps * size) {
        // K_t[a][b] for a of n and b of m.
        const long down = wide ? (long)inputs * taps : taps, right = wide ? taps : (long)inputs * taps;
#pragma omp parallel for num_threads(threads) schedule(static)
        for (int a = 0; a < n; ++a)
            for (int b = 0; b < m; ++b) {
                const float* from = weight + a * down + b * right + pairs;
                float *to = &numbers[(size_t)a * m_row + b], *other = to + pairs * size;
                *to = scale * *from;
                for (int k = 1; k <= pairs; ++k)
                    to[k * size] = scale * (from[k] + from[-k]), other[k * size] = scale * (from[k] - from[-k]);
            }
    }

    const float* sums(int pair) const { return &numbers[pair * size]; }
    const float* differences(int pair) const { return &numbers[(pairs + pair) * size]; }

    // What taps in the middle, sums and differences make of something -> what the taps make of it, in their order.
    void each_tap(float* x, int row) const {
        std::vector<float> found((size_t)taps * row);
        std::copy_n(x, row, &found[(size_t)pairs * row]);
        for (int k = 1; k <= pairs; ++k)
            for (int i = 0; i < row; ++i) {
                float sum = x[k * row + i], difference = x[(pairs + k) * row + i];
                found[(pairs + k) * row + i] = (sum + difference) / 2, found[(pairs - k) * row + i] = (sum - difference) / 2;
            }
        std::copy(found.begin(), found.end(), x);
    }

    // K_t^T c of each tap, tap by tap.
    void pull_each(int rows, const float* channels, float* pulled) const {
        for (int t = 0; t < taps; ++t)
            product<Full>({channels, 4L * n_row, 4}, &numbers[t * size], m_row, n, rows, m, pulled + t * m_row,
                          (long)taps * m_row, false);
        for (int i = 0; i < rows; ++i) each_tap(pulled + (size_t)i * taps * m_row, m_row);
    }

    // K_t z of each tap, tap by tap.
    void push_each(int rows, const float* put_in, float* pushed) const {
        for (int i = 0; i < rows; ++i, put_in += m_row, pushed += (size_t)taps * n_row) {
            for (int t = 0; t < taps; ++t)
                for (int a = 0; a < n; ++a) pushed[t * n_row + a] = dot(&numbers[t * size + (size_t)a * m_row], put_in, m_row);
            each_tap(pushed, n_row);
        }
    }
};

// K(f), rows of m_row floats, at one frequency.
struct Symbol {
    const Taps& k;
    std::vector<float> real, imaginary;

    explicit Symbol(const Taps& k) : k(k), real(k.size), imaginary(k.size) {}

    // So many at once share the reading of the taps.
    template <int N>
    static void make(Symbol* const (&symbols)[N], const float* frequencies) {
        const Taps& k = symbols[0]->k;
        const int radius = k.kernel / 2;
        std::vector<float> cos(N * (k.pairs + 1)), sin(cos);
        for (int i = 0; i < N; ++i)
            for (int pair = 0; pair <= k.pairs; ++pair) {
                int t = k.pairs + pair;
                float angle = frequencies[2 * i] * (t / k.kernel - radius) + frequencies[2 * i + 1] * (t % k.kernel - radius);
                cos[pair * N + i] = std::cos(angle), sin[pair * N + i] = std::sin(angle);
            }
        for (size_t at = 0; at < k.size; at += LANES) {
            V x[N], y[N] = {};
            for (int i = 0; i < N; ++i) x[i] = load(&k.numbers[at]);
            for (int pair = 1; pair <= k.pairs; ++pair) {
                V sum = load(k.sums(pair) + at), difference = load(k.differences(pair) + at);
                for (int i = 0; i < N; ++i) x[i] += cos[pair * N + i] * sum, y[i] += sin[pair * N + i] * difference;
            }
            for (int i = 0; i < N; ++i) store(&symbols[i]->real[at], x[i]), store(&symbols[i]->imaginary[at], y[i]);
        }
    }

    // z = K(f)* c
    void pull(const float* c, float* z) const {
        int i = 0;
        for (; i + 4 * LANES <= k.m_row; i += 4 * LANES) pull_some<4>(c, z, i);
        for (; i < k.m_row; i += LANES) pull_some<1>(c, z, i);
    }

    // c = K(f) z
    void push(const float* z, float* c) const {
        int a = 0;
        for (; a + 4 <= k.n; a += 4) push_some<4>(z, c, a);
        for (; a < k.n; ++a) push_some<1>(z, c, a);
    }

   private:
    template <int N>
    void pull_some(const float* c, float* z, int from) const {
        V x[N] = {}, y[N] = {};
        const float *re = &real[from], *im = &imaginary[from];
        for (int a = 0; a < k.n; ++a, re += k.m_row, im += k.m_row) {
            V cos = all(c[a]), sin = all(c[k.n_row + a]);
#pragma GCC unroll 4
            for (int v = 0; v < N; ++v) {
                V r = load(re + v * LANES), i = load(im + v * LANES);
                x[v] += r * cos, y[v] += r * sin;
                x[v] += i * sin, y[v] -= i * cos;
            }
        }
        for (int v = 0; v < N; ++v) store(z + from + v * LANES, x[v]), store(z + k.m_row + from + v * LANES, y[v]);
    }

    template <int N>
    void push_some(const float* z, float* c, int a) const {
        V x[N] = {}, y[N] = {};
        for (int b = 0; b < k.m_row; b += LANES) {
            V zr = load(z + b), zi = load(z + k.m_row + b);
#pragma GCC unroll 4
            for (int i = 0; i < N; ++i) {
                size_t at = (size_t)(a + i) * k.m_row + b;
                V r = load(&real[at]), im = load(&imaginary[at]);
                x[i] += r * zr, y[i] += r * zi;
                x[i] -= im * zi, y[i] += im * zr;
            }
        }
        for (int i = 0; i < N; ++i) c[a + i] = total(x[i]), c[k.n_row + a + i] = total(y[i]);
    }
};

// Real and imaginary part of exp(i f.p) z, largest in the middle of the image and 0 outside, for the z that K(f) takes
// to `channels`; and what the convolution makes of them.
void fade(const Taps& k, const float* frequency, const float* channels, int h, int w, int threads, float* images,
          float* responses) {
    const int outputs = k.wide ? k.n : k.m, inputs = k.wide ? k.m : k.n, z_row = k.wide ? k.m_row : k.n_row;
    const int out_row = k.wide ? k.n_row : k.m_row;
    std::vector<float> z(2 * z_row), put_out((size_t)2 * k.taps * out_row);
    if (k.wide) {
        Symbol symbol(k);
        Symbol::make({&symbol}, frequency);
        symbol.pull(channels, z.data());
        k.push_each(2, z.data(), put_out.data());
    } else {  // what K^T puts out is the complex conjugate of what goes into K
        for (int i = 0; i < k.n_row; ++i) z[i] = channels[i], z[z_row + i] = -channels[k.n_row + i];
        k.pull_each(2, z.data(), put_out.data());
    }
    const int radius = k.kernel / 2, rows = h + 2 * radius, row = w + 2 * radius, pixels = h * row;
    std::vector<float> cos(rows * row + k.taps * LANES), sin(cos.size());
    std::vector<std::complex<double>> right(w);
    // Along one axis, within the image: half a sine times exp(i f p).
    auto along = [](int at, int size, float f) {
        return std::polar(std::sin(M_PI * (at + 1) / (size + 1)), f * (at - (size - 1) / 2.0));
    };
    for (int y = 0; y < h; ++y) {
        std::complex<double> down = along(y, h, frequency[0]);
        for (int x = 0; x < w; ++x) {
            if (y == 0) right[x] = along(x, w, frequency[1]);
            std::complex<double> wave = down * right[x];
            int at = (y + radius) * row + x + radius;
            cos[at] = wave.real(), sin[at] = wave.imag();
        }
    }
    // Rows of pixels stand one behind the other, with what is beyond the edges between them.
    auto keep_rows = [&](const std::vector<float>& all_pixels, float* to) {
        for (int y = 0; y < h; ++y) std::copy_n(&all_pixels[y * row], w, to + y * w);
    };
    std::vector<int> seen_from;  // where each tap sees the wave from
    for (int t = 0; t < k.taps; ++t) seen_from.push_back(t / k.kernel * row + t % k.kernel);
    auto write = [&](int taps, const int* from, const float* re, const float* im, int step, float* to, long half) {
        std::vector<float> real(up(pixels, LANES)), imaginary(real);
        for (int p = 0; p < pixels; p += LANES) {
            V x = {}, y = {};
            for (int t = 0; t < taps; ++t) {
                V a = all(re[t * step]), b = all(im[t * step]), c = load(&cos[p + from[t]]), s = load(&sin[p + from[t]]);
                x += a * c - b * s, y += a * s + b * c;
            }
            store(&real[p], x), store(&imaginary[p], y);
        }
        keep_rows(real, to), keep_rows(imaginary, to + half);
    };
    const long size = (long)h * w;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int c = 0; c < inputs + outputs; ++c) {
        if (c < inputs)
            write(1, &seen_from[k.taps / 2], &z[c], &z[z_row + c], 0, images + c * size, inputs * size);
        else {
            const float* own = &put_out[c - inputs];
            write(k.taps, seen_from.data(), own, own + k.taps * out_row, out_row, responses + (c - inputs) * size,
                  outputs * size);
        }
    }
}

}  // namespace
