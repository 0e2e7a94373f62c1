// A kernel's taps at any frequencies: K(f) = sum_t K_t exp(i f.t), and waves that fade towards the edges of an image.
#pragma once
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

struct Turns;

struct Taps {
    int n, m, kernel, taps;
    bool wide;
    int n_row, m_row, turned_row;
    std::vector<float> pulling, pushing;

    Taps(const float* weight, int outputs, int inputs, int kernel, int threads)
        : n(std::min(outputs, inputs)), m(std::max(outputs, inputs)), kernel(kernel), taps(kernel * kernel),
          wide(outputs <= inputs), n_row(up(n, LANES)), m_row(up(m, LANES)), turned_row(taps * n + LANES),
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
    void each_tap(int rows, const float* channels, float* pulled) const {
        for (int t = 0; t < taps; ++t)
            panels(channels, n_row, &pulling[(size_t)t * n * WIDTH], taps * n, n, rows, m, pulled + t * m_row,
                   taps * m_row);
    }

    // K(f)* c = sum_t exp(-i f.t) K_t^T c.
    void pull(const Turns& turns, int count, const float* channels, float* turned, float* put_in) const;
    // K(f) z = sum_t exp(i f.t) K_t z; `put_out` takes K_t z.
    void push(const Turns& turns, int count, const float* put_in, float* put_out, float* image) const;
    void put_out_each(int rows, const float* put_in, float* put_out) const {
        panels(put_in, m_row, pushing.data(), m, m, rows, taps * n_row, put_out, taps * n_row);
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

void Taps::pull(const Turns& turns, int count, const float* channels, float* turned, float* put_in) const {
    for (int f = 0; f < count; ++f) {
        const float *real = channels + (size_t)2 * f * n_row, *imaginary = real + n_row;
        float *to_real = turned + (size_t)2 * f * turned_row, *to_imaginary = to_real + turned_row;
        for (int t = 0; t < taps; ++t) {
            V cos = all(turns.cos[f * taps + t]), sin = all(turns.sin[f * taps + t]);
            for (int i = 0; i < n; i += LANES) {  // what is written beyond n is overwritten by the next tap
                V x = load(real + i), y = load(imaginary + i);
                store(to_real + t * n + i, cos * x + sin * y), store(to_imaginary + t * n + i, cos * y - sin * x);
            }
        }
    }
    panels(turned, turned_row, pulling.data(), taps * n, taps * n, 2 * count, m, put_in, m_row);
}

void Taps::push(const Turns& turns, int count, const float* put_in, float* put_out, float* image) const {
    put_out_each(2 * count, put_in, put_out);
    for (int f = 0; f < count; ++f) {
        const float *from = put_out + (size_t)2 * f * taps * n_row, *other = from + taps * n_row;
        for (int i = 0; i < n_row; i += LANES) {
            V real = {}, imaginary = {};
            for (int t = 0; t < taps; ++t) {
                V cos = all(turns.cos[f * taps + t]), sin = all(turns.sin[f * taps + t]);
                V x = load(from + t * n_row + i), y = load(other + t * n_row + i);
                real += cos * x - sin * y, imaginary += sin * x + cos * y;
            }
            store(image + (size_t)2 * f * n_row + i, real), store(image + ((size_t)2 * f + 1) * n_row + i, imaginary);
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
        std::vector<float> turned(2 * k.turned_row);
        k.pull(Turns(k, frequency, 1), 1, channels, turned.data(), z.data());
        k.put_out_each(2, z.data(), put_out.data());
    } else {  // what K^T puts out is the complex conjugate of what goes into K
        for (int i = 0; i < k.n_row; ++i) z[i] = channels[i], z[z_row + i] = -channels[k.n_row + i];
        k.each_tap(2, z.data(), put_out.data());
    }
    const int radius = k.kernel / 2, rows = h + 2 * radius, row = w + 2 * radius, pixels = h * row;
    std::vector<float> cos(rows * row + k.taps * LANES), sin(cos.size());
    auto arc = [&](int at, int size) { return at < 0 || at >= size ? 0.0 : std::sin(M_PI * (at + 1) / (size + 1)); };
    for (int y = 0; y < rows; ++y)
        for (int x = 0; x < row; ++x) {
            double height = arc(y - radius, h) * arc(x - radius, w);
            double angle = frequency[0] * (y - (rows - 1) / 2.0) + frequency[1] * (x - (row - 1) / 2.0);
            if (height) cos[y * row + x] = height * std::cos(angle), sin[y * row + x] = height * std::sin(angle);
        }
    // Rows of pixels stand one behind the other, with what is beyond the edges between them.
    auto keep_rows = [&](const std::vector<float>& all_pixels, float* to) {
        for (int y = 0; y < h; ++y) std::copy_n(&all_pixels[y * row], w, to + y * w);
    };
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int c = 0; c < inputs + outputs; ++c) {
        std::vector<float> real(up(pixels, LANES)), imaginary(real);
        bool in = c < inputs;
        int taps = in ? 1 : k.taps, channel = in ? c : c - inputs;
        for (int p = 0; p < pixels; p += LANES) {
            V re = {}, im = {};
            for (int t = 0; t < taps; ++t) {
                int at = p + (in ? radius * (row + 1) : t / k.kernel * row + t % k.kernel);
                float a = in ? z[channel] : put_out[t * out_row + channel];
                float b = in ? z[z_row + channel] : put_out[(k.taps + t) * out_row + channel];
                V x = load(&cos[at]), y = load(&sin[at]);
                re += a * x - b * y, im += a * y + b * x;
            }
            store(&real[p], re), store(&imaginary[p], im);
        }
        float* to = in ? images : responses;
        long half = (long)(in ? inputs : outputs) * h * w;
        keep_rows(real, to + (long)channel * h * w), keep_rows(imaginary, to + half + (long)channel * h * w);
    }
}

}  // namespace
