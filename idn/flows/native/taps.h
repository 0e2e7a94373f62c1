// A kernel's taps at any frequencies: K(f) = sum_t K_t exp(i f.t), and waves that fade towards the edges of an image.
#pragma once
#include <complex>
#include "products.h"

namespace {

constexpr int WIDTH = PANEL * LANES;  // of a panel, which is packed so that a product reads it from end to end

// c = a b. A panel of b has `height` rows in memory, of which the first `sum` take part.
void panels(const float* a, long a_row, const float* b, long height, int sum, int rows, int columns, float* c,
            long c_row) {
    Left left = {a, 4 * a_row, 4};
    int vectors = up(columns, LANES) / LANES;
    for (; vectors > 0; vectors -= PANEL, b += height * WIDTH, c += WIDTH) {
        if (vectors >= PANEL) panel<Full, PANEL>(left, b, WIDTH, sum, rows, c, c_row, false);
        else if (vectors == 2) panel<Full, 2>(left, b, WIDTH, sum, rows, c, c_row, false);
        else panel<Full, 1>(left, b, WIDTH, sum, rows, c, c_row, false);
    }
}

struct Taps {
    int n, m, kernel, taps;
    bool wide;
    int n_row, m_row;
    std::vector<float> pulling, pushing;

    Taps(const float* weight, int outputs, int inputs, int kernel, int threads)
        : n(std::min(outputs, inputs)), m(std::max(outputs, inputs)), kernel(kernel), taps(kernel * kernel),
          wide(outputs <= inputs), n_row(up(n, LANES)), m_row(up(m, LANES)),
          pulling((size_t)up(m_row, WIDTH) * taps * n), pushing((size_t)up(taps * n_row, WIDTH) * m) {
        // K_t[a][b] for a of n and b of m.
        const long down = wide ? (long)inputs * taps : taps, right = wide ? taps : (long)inputs * taps;
#pragma omp parallel for num_threads(threads) schedule(static)
        for (int block = 0; block < n_row / LANES; ++block)
            for (int side = 0; side < 2; ++side) {
                int a0 = block * LANES, a1 = std::min(n, a0 + LANES);
                if (side)  // to pull, columns are b
                    for (int a = a0; a < a1; ++a)
                        for (int b = 0; b < m; ++b) {
                            const float* from = weight + a * down + b * right;
                            float* to = &pulling[(size_t)(b / WIDTH) * taps * n * WIDTH + (size_t)a * WIDTH + b % WIDTH];
                            for (int t = 0; t < taps; ++t) to[(size_t)t * n * WIDTH] = from[t];
                        }
                else  // to push, columns are taps with a
                    for (int b = 0; b < m; ++b)
                        for (int t = 0; t < taps; ++t) {
                            int column = t * n_row + a0;
                            const float* from = weight + a0 * down + b * right + t;
                            float* to = &pushing[(size_t)(column / WIDTH) * m * WIDTH + (size_t)b * WIDTH + column % WIDTH];
                            for (int a = 0; a < a1 - a0; ++a) to[a] = from[a * down];
                        }
            }
    }

    // K_t^T c of each tap, tap by tap.
    void pull_each(int rows, const float* channels, float* pulled) const {
        for (int t = 0; t < taps; ++t)
            panels(channels, n_row, &pulling[(size_t)t * n * WIDTH], taps * n, n, rows, m, pulled + t * m_row,
                   taps * m_row);
    }

    // K_t z of each tap, tap by tap.
    void push_each(int rows, const float* put_in, float* pushed) const {
        panels(put_in, m_row, pushing.data(), m, m, rows, taps * n_row, pushed, taps * n_row);
    }
};

// cos and sin of f.t for every frequency and tap.
struct Turns {
    std::vector<float> cos, sin;

    Turns(const Taps& k, const float* frequencies, int count) : cos(count * k.taps), sin(count * k.taps) {
        for (int i = 0; i < count * k.taps; ++i) {
            const float* f = frequencies + i / k.taps * 2;
            int t = i % k.taps, radius = k.kernel / 2;
            float angle = f[0] * (t / k.kernel - radius) + f[1] * (t % k.kernel - radius);
            cos[i] = std::cos(angle), sin[i] = std::sin(angle);
        }
    }
};

// The sum of exp(sign i f.t) x_t over taps, for every frequency: K(f)* c with -1 of what is pulled, K(f) z with 1 of
// what is pushed.
void turn(const Turns& turns, int taps, float sign, int count, const float* each, int row, float* sum) {
    for (int f = 0; f < count; ++f) {
        const float *from = each + (size_t)2 * f * taps * row, *other = from + taps * row;
        for (int i = 0; i < row; i += LANES) {
            V real = {}, imaginary = {};
            for (int t = 0; t < taps; ++t) {
                V cos = all(turns.cos[f * taps + t]), sin = all(sign * turns.sin[f * taps + t]);
                V x = load(from + t * row + i), y = load(other + t * row + i);
                real += cos * x - sin * y, imaginary += sin * x + cos * y;
            }
            store(sum + (size_t)2 * f * row + i, real), store(sum + ((size_t)2 * f + 1) * row + i, imaginary);
        }
    }
}

// Real and imaginary part of exp(i f.p) z, largest in the middle of the image and 0 outside, for the z that K(f) takes
// to `channels`; and what the convolution makes of them.
void fade(const Taps& k, const float* frequency, const float* channels, int h, int w, int threads, float* images,
          float* responses) {
    const int outputs = k.wide ? k.n : k.m, inputs = k.wide ? k.m : k.n, z_row = k.wide ? k.m_row : k.n_row;
    const int out_row = k.wide ? k.n_row : k.m_row;
    std::vector<float> z(2 * z_row), put_out((size_t)2 * k.taps * out_row);
    if (k.wide) {
        std::vector<float> pulled((size_t)2 * k.taps * k.m_row);
        k.pull_each(2, channels, pulled.data());
        turn(Turns(k, frequency, 1), k.taps, -1, 1, pulled.data(), k.m_row, z.data());
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
