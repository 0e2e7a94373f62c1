// A kernel's taps at any frequencies: K(f) = sum_t K_t exp(i f.t), and waves that fade towards the edges of an image.
#pragma once
#include <complex>
#include "lanes.h"

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
                found[(pairs + k) * row + i] = (sum + difference) / 2;
                found[(pairs - k) * row + i] = (sum - difference) / 2;
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
                for (int a = 0; a < n; ++a)
                    pushed[t * n_row + a] = dot(&numbers[t * size + (size_t)a * m_row], put_in, m_row);
            each_tap(pushed, n_row);
        }
    }
};

// K(f), rows of m_row floats, at one frequency.
struct Symbol {
    const Taps& k;
    Space real, imaginary;
    std::vector<V> sums;

    explicit Symbol(const Taps& k) : k(k), real(space(k.size)), imaginary(space(k.size)), sums(2 * k.n) {}

    // So many at once share the reading of the taps.
    template <int N>
    static void make(Symbol* symbols, const float* frequencies) {
        const Taps& k = symbols->k;
        const int radius = k.kernel / 2;
        std::vector<float> cos(N * (k.pairs + 1)), sin(cos);
        for (int i = 0; i < N; ++i)
            for (int pair = 0; pair <= k.pairs; ++pair) {
                int t = k.pairs + pair;
                const float* f = frequencies + 2 * i;
                float angle = f[0] * (t / k.kernel - radius) + f[1] * (t % k.kernel - radius);
                cos[pair * N + i] = std::cos(angle), sin[pair * N + i] = std::sin(angle);
            }
        for (size_t at = 0; at < k.size; at += LANES) {
            V x[N], y[N] = {};
            for (int i = 0; i < N; ++i) x[i] = load(&k.numbers[at]);
            for (int pair = 1; pair <= k.pairs; ++pair) {
                V sum = load(k.sums(pair) + at), difference = load(k.differences(pair) + at);
                for (int i = 0; i < N; ++i) x[i] += cos[pair * N + i] * sum, y[i] += sin[pair * N + i] * difference;
            }
            for (int i = 0; i < N; ++i) store(&symbols[i].real[at], x[i]), store(&symbols[i].imaginary[at], y[i]);
        }
    }

    // z = K(f)* c, and if it is wanted, K(f) z. Columns are taken a few at a time: what they have been multiplied with
    // to pull is still in a fast cache when it is time to push.
    void pull(const float* c, float* z, float* pushed = nullptr) {
        if (pushed) std::fill(sums.begin(), sums.end(), V{});
        int b = 0;
        for (; b + 4 * LANES <= k.m_row; b += 4 * LANES) pull_some<4>(c, z, b, pushed);
        for (; b < k.m_row; b += LANES) pull_some<1>(c, z, b, pushed);
        for (int a = 0; pushed && a < k.n; ++a)
            pushed[a] = total(sums[2 * a]), pushed[k.n_row + a] = total(sums[2 * a + 1]);
    }

   private:
    template <int N>
    void pull_some(const float* c, float* z, int from, bool push) {
        V x[N] = {}, y[N] = {}, other_x[N] = {}, other_y[N] = {};  // short chains
        const float *re = &real[from], *im = &imaginary[from];
        for (int a = 0; a < k.n; ++a) {
            V cos = all(c[a]), sin = all(c[k.n_row + a]);
#pragma GCC unroll 4
            for (int v = 0; v < N; ++v) {
                V r = load(re + (long)a * k.m_row + v * LANES), i = load(im + (long)a * k.m_row + v * LANES);
                x[v] += r * cos, y[v] += r * sin;
                other_x[v] += i * sin, other_y[v] += i * cos;
            }
        }
        for (int v = 0; v < N; ++v) x[v] += other_x[v], y[v] -= other_y[v];
        for (int v = 0; v < N; ++v) store(z + from + v * LANES, x[v]), store(z + k.m_row + from + v * LANES, y[v]);
        for (int a = 0; push && a < k.n; ++a) {
            V p = sums[2 * a], q = sums[2 * a + 1];
#pragma GCC unroll 4
            for (int v = 0; v < N; ++v) {
                V r = load(re + (long)a * k.m_row + v * LANES), i = load(im + (long)a * k.m_row + v * LANES);
                p += r * x[v], q += r * y[v];
                p -= i * y[v], q += i * x[v];
            }
            sums[2 * a] = p, sums[2 * a + 1] = q;
        }
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
        Symbol::make<1>(&symbol, frequency);
        symbol.pull(channels, z.data());
        k.push_each(2, z.data(), put_out.data());
    } else {  // what K^T puts out is the complex conjugate of what goes into K
        for (int i = 0; i < k.n_row; ++i) z[i] = channels[i], z[z_row + i] = -channels[k.n_row + i];
        k.pull_each(2, z.data(), put_out.data());
    }
    // Along one axis: half a sine times exp(i f p), and zeros beyond the image.
    const int radius = k.kernel / 2, padded = up(w, LANES);
    auto along = [&](int size, float f, std::vector<float>& real, std::vector<float>& imaginary) {
        real.assign(up(size, LANES) + 2 * radius, 0), imaginary = real;
        for (int p = 0; p < size; ++p) {
            std::complex<double> wave = std::polar(std::sin(M_PI * (p + 1) / (size + 1)), f * (p - (size - 1) / 2.0));
            real[p + radius] = wave.real(), imaginary[p + radius] = wave.imag();
        }
    };
    std::vector<float> down_re, down_im, right_re, right_im;
    along(h, frequency[0], down_re, down_im), along(w, frequency[1], right_re, right_im);
    // A row of taps sees the wave along its line; what it makes of it is the same for all lines but for a factor.
    auto lines = [&](int width, const float* re, const float* im, int step, float* made, float* to, long half) {
        const int first = radius - width / 2;
        for (int row = 0; row < width; ++row)
            for (int p = 0; p < padded; p += LANES) {
                V x = {}, y = {};
                for (int t = 0; t < width; ++t) {
                    V a = all(re[(row * width + t) * step]), b = all(im[(row * width + t) * step]);
                    V c = load(&right_re[p + first + t]), s = load(&right_im[p + first + t]);
                    x += a * c - b * s, y += a * s + b * c;
                }
                store(made + 2 * row * padded + p, x), store(made + (2 * row + 1) * padded + p, y);
            }
        for (int line = 0; line < h; ++line, to += w)
            for (int p = 0; p < w; p += LANES) {
                V x = {}, y = {};
                for (int row = 0; row < width; ++row) {
                    V a = all(down_re[line + first + row]), b = all(down_im[line + first + row]);
                    V c = load(made + 2 * row * padded + p), s = load(made + (2 * row + 1) * padded + p);
                    x += a * c - b * s, y += a * s + b * c;
                }
                put_some(to + p, x, w - p), put_some(to + half + p, y, w - p);
            }
    };
    const long size = (long)h * w;
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> made(2 * k.kernel * padded);
#pragma omp for schedule(static)
        for (int c = 0; c < inputs + outputs; ++c)
            if (c < inputs)
                lines(1, &z[c], &z[z_row + c], 0, made.data(), images + c * size, inputs * size);
            else {
                const float* own = &put_out[c - inputs];
                float* to = responses + (c - inputs) * size;
                lines(k.kernel, own, own + k.taps * out_row, out_row, made.data(), to, outputs * size);
            }
    }
}

}  // namespace
