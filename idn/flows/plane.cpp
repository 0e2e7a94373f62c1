// g(x) and ln det(I + J_g(x)) of a toy flow's branch with two inputs, and their gradients, in one pass each.
//
// A tile of points goes through all layers while it is in the cache: rows [values; first tangents; second tangents].
// Features stand side by side, each layer's behind those before it. What a dense layer reads is a prefix of them times
// products of a's and b's: written once as phi b_j / (a_0 ... a_j), they need only the number a_0 ... a_(i-1) behind
// layer i's product, so no weight is changed and nothing is scaled twice. Gradients t of what enters the activations
// stand side by side as well, the last layer's first. Vectors may write beyond the end of a layer's columns, where what
// comes next overwrites them, and read beyond it, where the weights are padded with zeros.
//
// In low precision words are pairs of bf16 numbers and products are sums of two; everything else is the same.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
#ifdef __AVX512BF16__
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
int row_length(int n) { return up(n, 32) + (up(n, 32) % 256 ? 32 : 64); }  // rows must not share their cache sets
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
    V e = 1 + f * (1.0f / 7);
    for (int i = 6; i; --i) e = 1 + f * e * (1.0f / i);
    return e * (V)((k + 127) << 23);
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

// x sigmoid(beta x) / c with its slope; `bend` is phi'' / beta, `hill` the part of d phi / d beta beside x^2.
template <class X>
struct Swish {
    X value, slope, hill, bend;
    Swish(X x, float beta, float divisor) {
        X q = beta * x, gate = 1 / (1 + exponential(-q));
        hill = gate * (1 - gate) / divisor;
        value = x * gate / divisor;
        slope = gate / divisor + q * hill;
        bend = hill * (2 + q * (1 - 2 * gate));
    }
    static float exponential(float x) { return std::exp(std::min(x, 87.0f)); }
    static V exponential(V x) { return ::exponential(x); }
};

float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }
float sigmoid(float x) { return 1 / (1 + std::exp(-x)); }

// What a layer's output goes through: nothing, LipSwish, or LipSwish of [x; -x].
struct Activation {
    int kind = NONE;
    float raw = 0, beta = 0, divisor = 1;
    int sides() const { return kind == CLIPSWISH ? 2 : 1; }
};

struct Layer {
    int inputs, outputs, start, t;  // where its features start, and where its gradients stand
    const float *weight, *u, *v, *bias, *eta;
    float sigma, limit, factor, shrink, concat, a = 1, b = 1, number = 1;
    std::vector<float> normalised, padded_bias;
    int dw, db;  // where its gradients are summed
    int padded() const { return up(outputs, LANES); }
};

// Features of the input, or of the layer before: `scale` is what they are multiplied with.
struct Group {
    Activation phi;
    int offset, width, before, first_t, after_t, z;
    float scale = 1;
};

template <class T>
struct Branch {
    typedef typename T::Number Number;
    bool dense;
    int features, gradients, stride, t_stride, widest = LANES, sums = 0, z_size = 0;
    std::vector<Layer> layers;
    std::vector<Group> groups;

    // ints: dense, number of layers, kind of the first activation; inputs, outputs and kind of each layer.
    // floats: its divisor; coeff, concat_coeff and divisor of each layer.
    // pointers: its beta; weight, u, v, bias, slack, shrink, beta, eta of each layer.
    Branch(const int* ints, const float* floats, const float* const* pointers) : dense(ints[0]) {
        int count = ints[1];
        layers.resize(count);
        groups.resize(count);
        groups[0].phi = activation(ints[2], pointers[0], floats[0]);
        groups[0].before = 2;
        features = 0;
        float product = 1;
        for (int i = 0; i < count; ++i) {
            Layer& layer = layers[i];
            const int* shape = ints + 3 + 3 * i;
            const float *number = floats + 1 + 3 * i, *const *at = pointers + 1 + 8 * i;
            layer.inputs = shape[0], layer.outputs = shape[1];
            layer.weight = at[0], layer.u = at[1], layer.v = at[2], layer.bias = at[3], layer.eta = at[7];
            layer.limit = number[0] / (1 + *at[4]);
            layer.shrink = T::PER_WORD == 2 ? *at[5] : 1;
            normalise(layer);
            Group& group = groups[i];
            group.offset = features, group.width = group.phi.sides() * group.before;
            features += group.width;
            layer.start = dense ? 0 : group.offset;
            layer.number = product;
            layer.dw = sums, sums += layer.outputs * up(layer.inputs, LANES);
            layer.db = sums, sums += layer.padded();
            if (i + 1 == count) break;
            Group& next = groups[i + 1];
            next.phi = activation(shape[2], at[6], number[2]);
            next.before = layer.outputs;
            next.z = z_size, z_size += 3 * TILE * layer.padded();
            widest = std::max({widest, layer.padded(), up(next.phi.sides() * layer.outputs, LANES)});
            if (!layer.eta) continue;
            float one = softplus(layer.eta[0]) + 0.1f, two = softplus(layer.eta[1]) + 0.1f;
            float length = std::sqrt(one * one + two * two);
            layer.concat = number[1];
            layer.a = number[1] * (one / length), layer.b = number[1] * (two / length);
            product *= layer.a;
            next.scale = layer.b / product;
        }
        gradients = 0;
        for (int i = count - 1; i >= 0; --i) {
            layers[i].t = gradients, gradients += layers[i].outputs;
            groups[i].first_t = dense ? 0 : layers[i].t, groups[i].after_t = gradients;
        }
        stride = row_length(features), t_stride = row_length(gradients);
        sums += up(count, LANES);  // of betas
    }

    static Activation activation(int kind, const float* raw, float divisor) {
        if (kind == NONE) return {};
        return {kind, *raw, softplus(*raw), divisor};
    }

    void normalise(Layer& layer) {
        int inputs = layer.inputs, outputs = layer.outputs;
        layer.sigma = 0;
        for (int o = 0; o < outputs; ++o) layer.sigma += layer.u[o] * dot(layer.weight + o * inputs, layer.v, inputs);
        layer.factor = layer.limit / std::max(layer.sigma, layer.limit);
        layer.normalised.resize(outputs * inputs + LANES);
        float* out = layer.normalised.data();
        for (int i = 0; i < outputs * inputs; ++i) out[i] = layer.weight[i] * layer.factor * layer.shrink;
        for (int i = 0; T::PER_WORD == 2 && i < outputs * inputs; i += LANES)
            store(out + i, T::rounded(load(out + i)));
        layer.padded_bias.assign(layer.padded(), 0);
        std::copy_n(layer.bias, outputs, layer.padded_bias.begin());
    }

    // The transposed weight, for x -> W x.
    std::vector<float> forward_words(const Layer& layer) const {
        int width = layer.padded();
        std::vector<float> words(up(layer.inputs, T::PER_WORD) / T::PER_WORD * width, 0.0f);
        Number* numbers = (Number*)words.data();
        for (int o = 0; o < layer.outputs; ++o) {
            const float* row = &layer.normalised[o * layer.inputs];
            for (int k = 0; k < layer.inputs; ++k) numbers[place(k, o, width)] = T::number(row[k]);
        }
        return words;
    }

    // The weights of all layers that read a group, one below the other, for t -> W^T t.
    std::vector<float> backward_words(int g) const {
        const Group& group = groups[g];
        int width = up(group.width, LANES), rows = group.after_t - group.first_t;
        std::vector<float> words(up(rows, T::PER_WORD) / T::PER_WORD * width, 0.0f);
        Number* numbers = (Number*)words.data();
        readers(g, [&](const float* row, int q) {
            for (int c = 0; c < group.width; ++c) numbers[place(q, c, width)] = T::number(row[c]);
        });
        return words;
    }

    // The same by columns: of the last layer's weight forwards, of the input's features backwards.
    std::vector<float> columns(int count, int length, int& words) const {
        words = up(up(length, T::PER_WORD) / T::PER_WORD, LANES);
        return std::vector<float>(count * words, 0.0f);
    }
    std::vector<float> last_words(int& words) const {
        const Layer& last = layers.back();
        std::vector<float> out = columns(2, last.inputs, words);
        for (int i = 0; i < 2 * last.inputs; ++i) {
            int o = i / last.inputs, k = i % last.inputs;
            ((Number*)out.data())[o * words * T::PER_WORD + k] = T::number(last.normalised[i]);
        }
        return out;
    }
    std::vector<float> first_words(int& words) const {
        const Group& group = groups[0];
        std::vector<float> out = columns(group.width, group.after_t - group.first_t, words);
        readers(0, [&](const float* row, int q) {
            for (int c = 0; c < group.width; ++c)
                ((Number*)out.data())[c * words * T::PER_WORD + q] = T::number(row[c]);
        });
        return out;
    }

    template <class F>
    void readers(int g, F each) const {
        const Group& group = groups[g];
        for (int i = g; i < (dense ? (int)layers.size() : g + 1); ++i)
            for (int o = 0; o < layers[i].outputs; ++o) {
                const float* row = &layers[i].normalised[o * layers[i].inputs];
                each(row + group.offset - layers[i].start, layers[i].t + o - group.first_t);
            }
    }

    // Where a number of a matrix of words stands, whose pairs go down.
    static int place(int row, int column, int width) {
        return (row / T::PER_WORD * width + column) * T::PER_WORD + row % T::PER_WORD;
    }
};


// One tile of points on its way through the layers.
template <class T>
struct Tile {
    typedef typename T::Number Number;
    const Branch<T>& g;
    int points, rows;  // both padded
    const float* x;
    int n;
    Number* z;  // what enters the activations, kept for the way back

    Tile(const Branch<T>& g, const float* x, int n, Number* z)
        : g(g), points(up(n, POINTS)), rows(3 * points), x(x), n(n), z(z) {}

    static constexpr long BYTES = sizeof(Number);
    float* wide_buffer(float*& space, int width) const {
        float* start = space;
        space += 3 * TILE * width + LANES;
        return start;
    }

    // The features of the points and tangents themselves. Paired rows are those that words down the rows are made of.
    void enter(Number* features, bool paired) const {
        const Group& group = g.groups[0];
        auto put = [&](int row, int column, float value) {
            int at = paired ? Branch<T>::place(row, column, g.stride) : row * g.stride + column;
            features[at] = T::number(T::rounded(value));
        };
        for (int p = 0; p < points; ++p)
            for (int c = 0; c < group.width; ++c) {
                int d = c % 2;
                float sign = c < 2 ? 1 : -1, at = p < n ? sign * x[2 * p + d] : 0, value = at, slope = 1;
                if (group.phi.kind) {
                    Swish<float> phi(at, group.phi.beta, group.phi.divisor);
                    value = phi.value, slope = phi.slope;
                }
                put(p, c, value);
                put(points + p, c, d == 0 ? sign * slope : 0);
                put(2 * points + p, c, d == 1 ? sign * slope : 0);
            }
    }

    // The features that a layer's activation makes of what entered it.
    template <bool PAIRED>
    void activate(const Group& group, Number* features) const {
        int padded = up(group.before, LANES);
        const Number* entered = z + group.z;
        for (int side = 0; side < group.phi.sides(); ++side)
            for (int c = 0; c < padded; c += LANES)
                for (int p = 0; p < points; p += 2) {
                    V made[3][2];
                    for (int i = 0; i < 2; ++i) {
                        auto at = [&](int j) { return T::get(entered + (j * points + p + i) * padded + c); };
                        float sign = side ? -1 : 1;
                        Swish<V> phi(sign * at(0), group.phi.beta, group.phi.divisor);
                        V slope = phi.slope * (sign * group.scale);
                        made[0][i] = phi.value * group.scale, made[1][i] = at(1) * slope, made[2][i] = at(2) * slope;
                    }
                    int column = group.offset + side * group.before + c;
                    for (int j = 0; j < 3; ++j) {
                        Number* row = features + (j * points + p) * g.stride;
                        if (PAIRED) {
                            T::put_pair(row + column * T::PER_WORD, g.stride, made[j][0], made[j][1]);
                        } else {
                            T::put(row + column, made[j][0]);
                            T::put(row + g.stride + column, made[j][1]);
                        }
                    }
                }
    }

    void forward(const std::vector<std::vector<float>>& words, int last_words, float* space, float* gx, float* logdet,
                 float* jacobian) {
        float* made = wide_buffer(space, g.widest);
        Number* features = (Number*)space;
        enter(features, false);
        int last = g.layers.size() - 1;
        for (int i = 0; i < last; ++i) {
            const Layer& layer = g.layers[i];
            int width = layer.padded(), sum = up(layer.inputs, T::PER_WORD) / T::PER_WORD;
            product<T>({features + layer.start, g.stride * BYTES, 4}, words[i].data(), width, sum, rows, width, made,
                       width, false);
            Number* entering = z + g.groups[i + 1].z;
            for (int r = 0; r < rows; ++r)
                for (int c = 0; c < width; c += LANES) {
                    V value = load(made + r * width + c) * layer.number;
                    if (r < points) value += load(&layer.padded_bias[c]);
                    T::put(entering + r * width + c, value);
                }
            activate<false>(g.groups[i + 1], features);
        }
        const Layer& layer = g.layers[last];
        two_columns<T>((const char*)(features + layer.start), g.stride * BYTES, words[last].data(), last_words, rows,
                       made, 2);
        for (int p = 0; p < n; ++p) {
            const float *first = made + 2 * (points + p), *second = first + 2 * points;
            float j[4] = {first[0], first[1], second[0], second[1]};
            for (int d = 0; d < 2; ++d) gx[2 * p + d] = layer.number * made[2 * p + d] + layer.bias[d];
            for (int d = 0; d < 4; ++d) jacobian[4 * p + d] = j[d] * layer.number;
            logdet[p] = std::log(determinant(jacobian + 4 * p));
        }
    }

    static float determinant(const float* j) { return (1 + j[0]) * (1 + j[3]) - j[1] * j[2]; }

    // Gradients of what the activation made become those of what entered it, times the layer's number.
    float back(const Group& group, const Layer& layer, const float* into, int width, Number* t, Number* paired,
               float* into_bias) const {
        int padded = layer.padded();
        const Number* entered = z + group.z;
        V into_beta = {};
        for (int c = 0; c < padded; c += LANES) {
            V bias = {};
            for (int p = 0; p < points; p += 2) {
                V made[3][2] = {};
                for (int i = 0; i < 2; ++i)
                    for (int side = 0; side < group.phi.sides(); ++side) {
                        float sign = side ? -1 : 1;
                        auto at = [&](int j) { return sign * T::get(entered + (j * points + p + i) * padded + c); };
                        auto grad = [&](int j) {
                            return group.scale * load(into + (j * points + p + i) * width + side * group.before + c);
                        };
                        V x = at(0), d0 = grad(0), d1 = grad(1), d2 = grad(2);
                        Swish<V> phi(x, group.phi.beta, group.phi.divisor);
                        V bend = phi.bend * (at(1) * d1 + at(2) * d2), slope = sign * phi.slope;
                        made[0][i] += slope * d0 + sign * group.phi.beta * bend;
                        made[1][i] += slope * d1, made[2][i] += slope * d2;
                        into_beta += x * (d0 * x * phi.hill + bend);
                    }
                bias += made[0][0] + made[0][1];
                for (int j = 0; j < 3; ++j) {
                    V one = made[j][0] * layer.number, two = made[j][1] * layer.number;
                    long row = (long)(j * points + p) * g.t_stride;
                    T::put_pair(paired + row + (layer.t + c) * T::PER_WORD, g.t_stride, one, two);
                    if (T::PER_WORD == 1) continue;
                    T::put(t + row + layer.t + c, one);
                    T::put(t + row + g.t_stride + layer.t + c, two);
                }
            }
            store(into_bias + c, load(into_bias + c) + bias);
        }
        return total(into_beta);
    }

    void backward(const std::vector<std::vector<float>>& words, int first_words, float* space, const float* into_gx,
                  const float* into_logdet, const float* jacobian, float* into_x, float* sums) {
        int last = g.layers.size() - 1;
        float* into = wide_buffer(space, g.widest);
        Number* features = (Number*)wide_buffer(space, g.stride);
        Number* paired = (Number*)wide_buffer(space, g.t_stride);
        Number* t = T::PER_WORD == 1 ? paired : (Number*)space;
        float* into_betas = sums + g.sums - up(last + 1, LANES);
        enter(features, true);
        for (int i = 1; i <= last; ++i) activate<true>(g.groups[i], features);
        leave(t, paired, into_gx, into_logdet, jacobian, sums + g.layers[last].db);
        for (int i = last; i >= 0; --i) {
            const Layer& layer = g.layers[i];
            int inputs = up(layer.inputs, LANES);
            product<T>({(float*)paired + layer.t, 4, 4 * g.t_stride}, (float*)features + layer.start, g.stride,
                       rows / T::PER_WORD, layer.outputs, inputs, sums + layer.dw, inputs, true);
            if (i == 0) break;
            const Group& group = g.groups[i];
            int width = up(group.width, LANES), sum = up(group.after_t - group.first_t, T::PER_WORD) / T::PER_WORD;
            product<T>({t + group.first_t, g.t_stride * BYTES, 4}, words[i].data(), width, sum, rows, width, into,
                       width, false);
            const Layer& before = g.layers[i - 1];
            into_betas[i] += back(group, before, into, width, t, paired, sums + before.db);
        }
        const Group& group = g.groups[0];
        for (int c = 0; c < group.width; c += 2)
            two_columns<T>((const char*)(t + group.first_t), g.t_stride * BYTES, &words[0][c * first_words],
                           first_words, rows, into + c, 4);
        into_betas[0] += back_to_input(into, into_x);
    }

    // The gradients of the last layer's rows, from those of g(x) and of ln det(I + J).
    void leave(Number* t, Number* paired, const float* into_gx, const float* into_logdet, const float* jacobian,
               float* into_bias) const {
        const Layer& layer = g.layers.back();
        for (int p = 0; p < points; ++p) {
            float rows[3][2] = {};  // of padding points too: another tile was here
            if (p < n) {
                const float* j = jacobian + 4 * p;
                float part = into_logdet[p] / determinant(j);
                rows[0][0] = into_gx[2 * p], rows[0][1] = into_gx[2 * p + 1];
                rows[1][0] = part * (1 + j[3]), rows[1][1] = -part * j[2];
                rows[2][0] = -part * j[1], rows[2][1] = part * (1 + j[0]);
            }
            for (int d = 0; d < 2; ++d) {
                into_bias[d] += rows[0][d];
                for (int k = 0; k < 3; ++k) {
                    int row = k * points + p;
                    Number number = T::number(T::rounded(rows[k][d] * layer.number));
                    paired[Branch<T>::place(row, d, g.t_stride)] = number;
                    t[row * g.t_stride + d] = number;
                }
            }
        }
    }

    float back_to_input(const float* into, float* into_x) const {
        const Activation& phi = g.groups[0].phi;
        float into_beta = 0;
        for (int p = 0; p < n; ++p)
            for (int d = 0; d < 2; ++d) {
                const float *value = into + 4 * p, *tangent = into + 4 * ((1 + d) * points + p);
                if (!phi.kind) {
                    into_x[2 * p + d] = value[d];
                    continue;
                }
                float sum = 0;
                for (int side = 0; side < phi.sides(); ++side) {
                    float sign = side ? -1 : 1, at = sign * x[2 * p + d];
                    Swish<float> swish(at, phi.beta, phi.divisor);
                    float grad = value[2 * side + d], bend = swish.bend * sign * tangent[2 * side + d];
                    sum += sign * (swish.slope * grad + phi.beta * bend);
                    into_beta += at * (grad * at * swish.hill + bend);
                }
                into_x[2 * p + d] = sum;
            }
        return into_beta;
    }
};

// Gradients of the raw parameters from the sums: dweight, dbias, dbeta, deta of each layer, after the first dbeta.
template <class T>
void finish(const Branch<T>& g, const float* sums, float* const* gradients) {
    int count = g.layers.size();
    const float* into_betas = sums + g.sums - up(count, LANES);
    std::vector<double> number(count, 0.0), scale(count + 1, 0.0);  // times their own gradients
    for (int i = 0; i < count; ++i) {
        const Layer& layer = g.layers[i];
        int inputs = layer.inputs, padded = up(inputs, LANES);
        double along = 0;
        for (int o = 0; o < layer.outputs; ++o) {
            const float *row = sums + layer.dw + o * padded, *normal = &layer.normalised[o * inputs];
            along += dot(row, layer.weight + o * inputs, inputs);
            for (int j = 0; g.dense && j <= i; ++j) {
                const Group& group = g.groups[j];
                double part = dot(row + group.offset, normal + group.offset, group.width);
                number[i] += part, scale[j] += part;
            }
        }
        float share = -along * layer.shrink * layer.factor / layer.sigma;
        if (layer.sigma <= layer.limit) share = 0;
        for (int o = 0; o < layer.outputs; ++o)
            for (int k = 0; k < inputs; ++k)
                gradients[1 + 4 * i][o * inputs + k] = sums[layer.dw + o * padded + k] * (layer.shrink * layer.factor) +
                                                       share * layer.u[o] * layer.v[k];
        std::copy_n(sums + layer.db, layer.outputs, gradients[2 + 4 * i]);
        const Activation& phi = g.groups[i].phi;
        float* into_beta = gradients[i ? 4 * i - 1 : 0];
        if (into_beta) *into_beta = into_betas[i] * sigmoid(phi.raw);
    }
    double later = 0;
    for (int j = count - 2; j >= 0; --j) {
        const Layer& layer = g.layers[j];
        later += number[j + 1] - scale[j + 1];
        if (!gradients[4 + 4 * j]) continue;
        // (a, b) = c eta / |eta| turn with eta, and do not grow with it.
        float one = softplus(layer.eta[0]) + 0.1f, two = softplus(layer.eta[1]) + 0.1f;
        double turn = (later / layer.a * layer.b - scale[j + 1] / layer.b * layer.a) / (one * one + two * two);
        gradients[4 + 4 * j][0] = turn * two * sigmoid(layer.eta[0]);
        gradients[4 + 4 * j][1] = -turn * one * sigmoid(layer.eta[1]);
    }
}

// A slot takes every threads-th tile; what slots sum is added in their order, so results do not depend on timing.
template <class F>
void in_tiles(int n, int threads, size_t space, F each) {
    int tiles = (n + TILE - 1) / TILE;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int slot = 0; slot < threads; ++slot) {
        static thread_local std::vector<float> buffer;
        buffer.assign(space, 0.0f);
        for (int tile = slot; tile < tiles; tile += threads)
            each(slot, buffer.data(), tile, tile * TILE, std::min(TILE, n - tile * TILE));
    }
}

template <class T>
void forward(const Branch<T>& g, int n, int threads, const float* x, float* gx, float* logdet, float* kept) {
    std::vector<std::vector<float>> words;
    int last_words;
    for (size_t i = 0; i + 1 < g.layers.size(); ++i) words.push_back(g.forward_words(g.layers[i]));
    words.push_back(g.last_words(last_words));
    auto* z = (typename T::Number*)(kept + 4 * n);
    size_t needed = 3 * TILE * (g.widest + g.stride) + 4 * LANES;
    in_tiles(n, threads, needed, [&](int, float* space, int tile, int start, int count) {
        Tile<T>(g, x + 2 * start, count, z + (size_t)tile * g.z_size)
            .forward(words, last_words, space, gx + 2 * start, logdet + start, kept + 4 * start);
    });
}

template <class T>
void backward(const Branch<T>& g, int n, int threads, const float* x, const float* into_gx, const float* into_logdet,
              float* kept, float* into_x, float* const* gradients) {
    std::vector<std::vector<float>> words;
    int first_words;
    words.push_back(g.first_words(first_words));
    for (size_t i = 1; i < g.groups.size(); ++i) words.push_back(g.backward_words(i));
    auto* z = (typename T::Number*)(kept + 4 * n);
    std::vector<float> sums((size_t)threads * g.sums, 0.0f);
    size_t needed = 3 * TILE * (g.widest + g.stride + 2 * g.t_stride) + 8 * LANES;
    in_tiles(n, threads, needed, [&](int slot, float* space, int tile, int start, int count) {
        Tile<T>(g, x + 2 * start, count, z + (size_t)tile * g.z_size)
            .backward(words, first_words, space, into_gx + 2 * start, into_logdet + start, kept + 4 * start,
                      into_x + 2 * start, &sums[(size_t)slot * g.sums]);
    });
    for (int slot = 1; slot < threads; ++slot)
        for (int i = 0; i < g.sums; ++i) sums[i] += sums[(size_t)slot * g.sums + i];
    finish(g, sums.data(), gradients);
}

template <class F>
void in_precision(int low, F run) {
#ifdef __AVX512BF16__
    if (low) return run(Low());
#endif
    run(Full());
}

}  // namespace

extern "C" {

int plane_low() {
#ifdef __AVX512BF16__
    return 1;
#else
    return 0;
#endif
}

// Floats to be kept between the passes.
int64_t plane_kept(const int* ints, int n) {
    int64_t z = 0;
    for (int i = 0; i + 1 < ints[1]; ++i) z += 3 * TILE * up(ints[4 + 3 * i], LANES);
    return 4 * (int64_t)n + (n + TILE - 1) / TILE * z;
}

void plane_forward(int low, const int* ints, const float* floats, const float* const* pointers, int n, int threads,
                   const float* x, float* gx, float* logdet, float* kept) {
    in_precision(low, [&](auto type) {
        forward(Branch<decltype(type)>(ints, floats, pointers), n, threads, x, gx, logdet, kept);
    });
}

void plane_backward(int low, const int* ints, const float* floats, const float* const* pointers, int n, int threads,
                    const float* x, const float* into_gx, const float* into_logdet, float* kept, float* into_x,
                    float* const* gradients) {
    in_precision(low, [&](auto type) {
        backward(Branch<decltype(type)>(ints, floats, pointers), n, threads, x, into_gx, into_logdet, kept, into_x,
                 gradients);
    });
}
}
