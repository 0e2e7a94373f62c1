// A start for the inverse of x + g(x) with a narrow image branch g, one image at a time, so that all stays in the cache.
//
// The method is that of inverse.py and correction.py: Anderson's combinations of corrected steps, at first on values of
// low precision. What is found here is judged there.
//
// Features are rows of channels, a row per pixel, within a margin of zeros. A block of a convolution's output, some
// pixels of a line times some vectors of channels, stays in registers while all that enters it is multiplied.
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
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif
constexpr int MARGIN = 1, MEMORY = 6;
// Of the Taylor series of 2^f, from the sixth power down.
constexpr float POWER[] = {1.5403530e-4f, 1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 0.24022651f, 0.69314718f, 1.0f};
typedef float V __attribute__((vector_size(4 * LANES)));
typedef float Unaligned __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t I __attribute__((vector_size(4 * LANES)));

int up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }
inline V load(const float* p) { return *(const Unaligned*)p; }
inline void store(float* p, V x) { *(Unaligned*)p = x; }
inline V all(float x) { return V{} + x; }
inline V lower(V a, V b) { return a < b ? a : b; }
inline V upper(V a, V b) { return a > b ? a : b; }

// The first `count` numbers, if there are fewer than LANES; others are zeros.
inline V load(const float* p, int count) {
    if (count >= LANES) return load(p);
#ifdef __AVX512F__
    return (V)_mm512_maskz_loadu_ps((1 << count) - 1, p);
#else
    V x = {};
    std::memcpy(&x, p, count * sizeof(float));
    return x;
#endif
}

inline void store(float* p, V x, int count) {
    if (count >= LANES) return store(p, x);
#ifdef __AVX512F__
    _mm512_mask_storeu_ps(p, (1 << count) - 1, (__m512)x);
#else
    std::memcpy(p, &x, count * sizeof(float));
#endif
}

// 2 to the power of x, to an error of 1e-7 of it.
inline V power_of_two(V x) {
    x = lower(upper(x, all(-126.0f)), all(126.0f));
    I k = __builtin_convertvector(x + 128.5f, I) - 128;
    V f = x - __builtin_convertvector(k, V), e = all(POWER[0]);
#pragma GCC unroll 6
    for (int i = 1; i < 7; ++i) e = POWER[i] + f * e;
    return e * (V)((k + 127) << 23);
}

inline V silu(V x) { return x / (1.0f + power_of_two(x * -1.44269504f)); }

// What is stored as a number (Low: bf16) and multiplied as a word (Low: a pair of them).
struct Full {
    typedef float Number;
    typedef V Words;
    static constexpr int PER_WORD = 1;
    static inline Words everywhere(const float* word) { return all(*word); }
    static inline Words words(const float* from) { return load(from); }
    static inline V add_product(V sum, Words a, Words b) { return sum + a * b; }
    static inline void put(float* to, V x) { store(to, x); }
};

#ifdef __AVX512BF16__
struct Low {
    typedef uint16_t Number;
    typedef __m512bh Words;
    static constexpr int PER_WORD = 2;
    static inline Words everywhere(const uint16_t* word) {
        int32_t pair;
        std::memcpy(&pair, word, 4);
        return (Words)_mm512_set1_epi32(pair);
    }
    static inline Words words(const uint16_t* from) { return (Words)_mm512_loadu_si512(from); }
    static inline V add_product(V sum, Words a, Words b) { return (V)_mm512_dpbf16_ps((__m512)sum, a, b); }
    static inline void put(uint16_t* to, V x) {
        _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh((__m512)x));
    }
};
#else
typedef Full Low;
#endif

struct Layer {
    int kernel, inputs, outputs, beside;  // beside: the outputs join the inputs
    const void* weight;                   // vectors of outputs, lines of taps, words of inputs, taps
    const float* bias;
};

struct Size {
    int channels, height, width;
    long numbers() const { return (long)channels * height * width; }
};

// Layers with silu between them, in one precision.
template <class T>
struct Branch {
    typedef typename T::Number Number;
    std::vector<Layer> layers;
    Size size;
    int stride;
    long line;
    std::vector<Number> first, second;  // images of features

    Branch(std::vector<Layer> layers, Size size, int entering) : layers(layers), size(size), stride(entering) {
        for (const Layer& l : layers) stride = std::max(stride, (l.beside ? l.inputs : 0) + up(l.outputs, LANES));
        line = (long)(size.width + 2 * MARGIN) * stride;
        first.resize((size.height + 2 * MARGIN) * line), second.resize(first.size());
    }

    Number* pixel(Number* image, int i, int j) const { return image + (i + MARGIN) * line + (long)(j + MARGIN) * stride; }

    template <class Row>
    void enter(Row row) {
        for (int i = 0; i < size.height; ++i)
            for (int j = 0; j < size.width; ++j) row(pixel(first.data(), i, j), ((long)i * size.width + j) * size.channels);
    }

    // What has entered leaves as `out`.
    void leave(float* out) {
        Number *here = first.data(), *there = second.data();
        for (const Layer& layer : layers) {
            float* leaving = &layer == &layers.back() ? out : nullptr;
            Number* to = layer.beside ? here + layer.inputs : there;
            int vectors = up(layer.outputs, LANES) / LANES;
            for (int v = 0, some; v < vectors; v += some) {
                some = vectors - v == 4 ? 2 : std::min(vectors - v, 3);
                if (layer.kernel == 3) convolve<3>(some, layer, v, here, to, leaving);
                else convolve<1>(some, layer, v, here, to, leaving);
            }
            if (!layer.beside) std::swap(here, there);
        }
    }

    template <int KERNEL>
    void convolve(int vectors, const Layer& layer, int v, Number* from, Number* to, float* out) const {
        for (int i = 0; i < size.height; ++i)
            if (vectors == 3) along<KERNEL, 3, 8>(layer, v, from, to, out, i, 0);
            else if (vectors == 2) along<KERNEL, 2, 8>(layer, v, from, to, out, i, 0);
            else along<KERNEL, 1, 16>(layer, v, from, to, out, i, 0);
    }

    // A line from pixel j on: as many blocks of PIXELS as there are, then smaller ones.
    template <int KERNEL, int VECTORS, int PIXELS>
    void along(const Layer& layer, int v, Number* from, Number* to, float* out, int i, int j) const {
        for (; j + PIXELS <= size.width; j += PIXELS) block<KERNEL, VECTORS, PIXELS>(layer, v, from, to, out, i, j);
        if constexpr (PIXELS > 1)
            if (j < size.width) along<KERNEL, VECTORS, PIXELS / 2>(layer, v, from, to, out, i, j);
    }

    template <int KERNEL, int VECTORS, int PIXELS>
    void block(const Layer& layer, int vector, Number* from, Number* to, float* out, int i, int j) const {
        constexpr int REACH = KERNEL / 2, STEP = LANES * T::PER_WORD;
        const int words = up(layer.inputs, T::PER_WORD) / T::PER_WORD;
        const long pace = stride, column = (long)KERNEL * KERNEL * words * STEP;
        const Number* weight = (const Number*)layer.weight + vector * column;
        V sum[PIXELS][VECTORS];
#pragma GCC unroll 16
        for (int p = 0; p < PIXELS; ++p)
#pragma GCC unroll 3
            for (int v = 0; v < VECTORS; ++v) sum[p][v] = load(layer.bias + (vector + v) * LANES);
        for (int dy = -REACH; dy <= REACH; ++dy) {
            const Number* entering = pixel(from, i + dy, j - REACH);
            for (int c = 0; c < words; ++c, entering += T::PER_WORD, weight += KERNEL * STEP)
                if constexpr (VECTORS < 3) {
                    // Each pixel is read once for all taps of a line.
                    typename T::Words taps[KERNEL][VECTORS];
#pragma GCC unroll 3
                    for (int dx = 0; dx < KERNEL; ++dx)
#pragma GCC unroll 3
                        for (int v = 0; v < VECTORS; ++v) taps[dx][v] = T::words(weight + v * column + dx * STEP);
#pragma GCC unroll 18
                    for (int q = 0; q < PIXELS + KERNEL - 1; ++q) {
                        auto word = T::everywhere(entering + q * pace);
#pragma GCC unroll 3
                        for (int dx = 0; dx < KERNEL; ++dx)
                            if (q - dx >= 0 && q - dx < PIXELS)
#pragma GCC unroll 3
                                for (int v = 0; v < VECTORS; ++v)
                                    sum[q - dx][v] = T::add_product(sum[q - dx][v], taps[dx][v], word);
                    }
                } else {
#pragma GCC unroll 3
                    for (int dx = 0; dx < KERNEL; ++dx)
#pragma GCC unroll 16
                        for (int p = 0; p < PIXELS; ++p) {
                            auto word = T::everywhere(entering + (p + dx) * pace);
#pragma GCC unroll 3
                            for (int v = 0; v < VECTORS; ++v)
                                sum[p][v] = T::add_product(sum[p][v], T::words(weight + v * column + dx * STEP), word);
                        }
                }
        }
        if (out) {
            const int width = layer.outputs - vector * LANES;
            out += ((long)i * size.width + j) * layer.outputs + vector * LANES;
#pragma GCC unroll 16
            for (int p = 0; p < PIXELS; ++p, out += layer.outputs)
#pragma GCC unroll 3
                for (int v = 0; v < VECTORS; ++v) store(out + v * LANES, sum[p][v], width - v * LANES);
            return;
        }
        Number* at = pixel(to, i, j) + vector * LANES;
#pragma GCC unroll 16
        for (int p = 0; p < PIXELS; ++p, at += pace)
#pragma GCC unroll 3
            for (int v = 0; v < VECTORS; ++v) T::put(at + v * LANES, silu(sum[p][v]));
    }
};

float dot(const float* a, const float* b, long n) {
    V sum[4] = {};
    for (long i = 0; i < n; i += 4 * LANES)
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) sum[k] += load(a + i + k * LANES) * load(b + i + k * LANES);
    V whole = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    float total = 0;
    for (int k = 0; k < LANES; ++k) total += whole[k];
    return total;
}

// The last few steps, where they lead, and their products.
struct Past {
    long length;
    std::vector<float> steps, results;
    double gram[MEMORY][MEMORY];
    int added = 0;

    Past(long length) : length(length), steps(MEMORY * length), results(MEMORY * length) {}
    float* step() { return &steps[added % MEMORY * length]; }

    // A step that has been written to `step()`, of which so much counts as unknown: the square of its length.
    void add(const float* x, double unknown) {
        const int slot = added++ % MEMORY, used = std::min(added, MEMORY);
        const float* step = &steps[slot * length];
        float* result = &results[slot * length];
        for (long i = 0; i < length; ++i) result[i] = x[i] + step[i];
        for (int k = 0; k < used; ++k) gram[slot][k] = gram[k][slot] = dot(step, &steps[k * length], length);
        gram[slot][slot] += unknown;
    }

    // The combination whose step is shortest.
    void best(float* x) const {
        const int used = std::min(added, MEMORY);
        double weights[MEMORY], sum = 0;
        solve(used, weights);
        for (int k = 0; k < used; ++k) sum += weights[k];
        if (!std::isfinite(sum) || sum == 0) {
            std::fill(weights, weights + used, 0.0);
            weights[(added - 1) % MEMORY] = sum = 1;
        }
        std::fill(x, x + length, 0.0f);
        for (int k = 0; k < used; ++k) {
            const float weight = weights[k] / sum, *result = &results[k * length];
            for (long i = 0; i < length; ++i) x[i] += weight * result[i];
        }
    }

    // gram w = 1, with steps made equally long, by Cholesky's factors.
    void solve(int n, double* w) const {
        double l[MEMORY][MEMORY], scale[MEMORY];
        for (int i = 0; i < n; ++i) scale[i] = 1 / std::sqrt(gram[i][i]);
        for (int i = 0; i < n; ++i) {
            for (int j = 0; j <= i; ++j) {
                double rest = gram[i][j] * scale[i] * scale[j] + (i == j ? 1.2e-7 : 0);
                for (int k = 0; k < j; ++k) rest -= l[i][k] * l[j][k];
                l[i][j] = i == j ? std::sqrt(rest) : rest / l[j][j];
            }
            w[i] = scale[i];
            for (int k = 0; k < i; ++k) w[i] -= l[i][k] * w[k];
            w[i] /= l[i][i];
        }
        for (int i = n; i--;) {
            for (int k = i + 1; k < n; ++k) w[i] -= l[k][i] * w[k];
            w[i] /= l[i][i];
        }
        for (int i = 0; i < n; ++i) w[i] *= scale[i];
    }
};

struct Plan {
    Size size;
    int active, gated, rough, most;  // the branch begins with silu; evaluations of low precision, and in all, at most
    float scale, gate, near, noise;
    std::vector<Layer> full, low, correction;
};

// What one thread needs.
struct Search {
    const Plan& plan;
    Branch<Full> full;
    Branch<Low> low, correction;
    Past past;
    std::vector<float> gx, r;

    Search(const Plan& plan)
        : plan(plan),
          full(plan.full, plan.size, up(plan.size.channels, LANES)),
          low(plan.low, plan.size, up(plan.size.channels, LANES)),
          correction(plan.correction, plan.size, plan.size.channels + up(plan.size.channels, LANES)),
          past(up(plan.size.numbers(), 4 * LANES)),
          gx(past.length),
          r(past.length) {}

    template <class T>
    void value(Branch<T>& g, const float* x) {
        const int channels = plan.size.channels;
        g.enter([&](typename T::Number* to, long at) {
            for (int c = 0; c < channels; c += LANES) {
                V v = load(x + at + c, channels - c) * plan.scale;
                T::put(to + c, plan.active ? silu(v) : v);
            }
        });
        g.leave(gx.data());
    }

    void correct(const float* x, float* step) {
        const int channels = plan.size.channels;
        correction.enter([&](typename Low::Number* to, long at) {
            for (int c = 0; c < channels; c += LANES) Low::put(to + c, load(&r[at + c], channels - c));
            for (int c = 0; plan.gated && c < channels; c += LANES) {
                V within = lower(upper(load(x + at + c, channels - c), all(-plan.gate)), all(plan.gate));
                Low::put(to + channels + c, within * load(&r[at + c], channels - c));
            }
        });
        correction.leave(step);
    }

    // From x on, to where residuals are no larger than `goal`, or the next step should make them so.
    void run(const float* y, float* x, float goal) {
        const long n = plan.size.numbers();
        int rough = plan.rough;
        float first = 0, before = 0;
        past.added = 0;
        for (int evaluation = 0; evaluation < plan.most; ++evaluation) {
            const bool exact = rough == 0;
            if (exact) value(full, x);
            else value(low, x);
            float size = 0, square = 0;
            for (long i = 0; i < n; ++i) r[i] = y[i] - gx[i] - x[i];
            V largest = {};
            for (long i = 0; i < past.length; i += LANES) largest = upper(largest, upper(load(&r[i]), -load(&r[i])));
            for (int k = 0; k < LANES; ++k) size = std::max(size, largest[k]);
            if (exact && size <= goal) return;
            correct(x, past.step());
            past.add(x, exact ? 0 : plan.noise * plan.noise * dot(gx.data(), gx.data(), past.length));
            past.best(x);
            if (exact) {
                if (size * size <= 0.5f * before * goal) return;
                before = size;
            } else {
                square = dot(r.data(), r.data(), past.length);
                if (evaluation == 0) first = square;
                rough = square <= plan.near * plan.near * first ? 0 : rough - 1;
            }
        }
    }
};

}  // namespace

extern "C" int images_lanes() { return LANES; }

extern "C" int images_per_word() { return Low::PER_WORD; }

// `ints`: channels, height, width, active, gated, rough, most, number of layers, and of each, and of the correction:
// kernel, inputs, outputs, beside. `floats`: scale, gate, near, noise. `tensors`, for each: its weight for both precisions, and
// its bias.
extern "C" void images_start(const int* ints, const float* floats, const void* const* tensors, long n, int threads,
                             const float* y, const float* goals, float* x) {
    Plan plan{{ints[0], ints[1], ints[2]}, ints[3], ints[4], ints[5], ints[6], floats[0], floats[1], floats[2], floats[3]};
    const int count = ints[7];
    ints += 8;
    for (int i = 0; i <= count; ++i, ints += 4, tensors += 3) {
        Layer layer{ints[0], ints[1], ints[2], ints[3], tensors[0], (const float*)tensors[2]}, low = layer;
        low.weight = tensors[1];
        if (i < count) plan.full.push_back(layer);
        (i < count ? plan.low : plan.correction).push_back(low);
    }
    const long numbers = plan.size.numbers();
#pragma omp parallel num_threads(threads)
    {
        Search search(plan);
        std::vector<float> at(search.past.length);
#pragma omp for schedule(dynamic)
        for (long i = 0; i < n; ++i) {
            std::copy(y + i * numbers, y + (i + 1) * numbers, at.begin());
            search.run(y + i * numbers, at.data(), goals[i]);
            std::copy(at.begin(), at.begin() + numbers, x + i * numbers);
        }
    }
}
