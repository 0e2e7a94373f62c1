// A branch: its layers with their normalised weights, the features they read, and the gradients of what it is made of.
#pragma once
#include "lanes.h"

namespace {

// What a layer's output goes through: nothing, LipSwish, or LipSwish of [x; -x].
struct Activation {
    int kind = NONE;
    float raw = 0, beta = 0, share = 1;  // share: of x sigmoid(beta x), one over a divisor
    int sides() const { return kind == CLIPSWISH ? 2 : 1; }
};

// x sigmoid(beta x) / c with its slope; `bend` is phi'' / beta, `hill` the part of d phi / d beta beside x^2.
template <class X>
struct Swish {
    X value, slope, hill, bend;
    Swish(X x, const Activation& phi) {
        X q = phi.beta * x, gate = reciprocal(1 + exponential(-q)), part = gate * phi.share;
        hill = part * (1 - gate);
        value = x * part;
        slope = part + q * hill;
        bend = hill * (2 + q * (1 - 2 * gate));
    }
    static float exponential(float x) { return std::exp(std::min(x, 87.0f)); }
    static float reciprocal(float x) { return 1 / x; }
    static V reciprocal(V x) { return ::reciprocal(x); }
    static V exponential(V x) { return ::exponential(x); }
};

float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }
float sigmoid(float x) { return 1 / (1 + std::exp(-x)); }

struct Layer {
    int inputs, outputs, start, t;  // where its features start, and where its gradients stand
    const float *weight, *u, *v, *bias, *eta;
    float sigma, limit, factor, shrink, concat, a = 1, b = 1, number = 1;
    std::vector<float> normalised, padded_bias;
    int dw, db;  // where its gradients are summed
    int padded() const { return up(outputs, LANES); }
};

// The last ones are the largest.
template <class Each>
void over_layers(int count, int threads, Each each) {
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (int i = 0; i < count; ++i) each(count - 1 - i);
}

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
    Branch(const int* ints, const float* floats, const float* const* pointers, int threads) : dense(ints[0]) {
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
        stride = row_length(features + 2 * LANES), t_stride = row_length(gradients + 2 * LANES);  // read beyond
        sums += up(count, LANES);  // of betas
        over_layers(count, threads, [&](int i) { normalise(layers[i]); });
    }

    static Activation activation(int kind, const float* raw, float divisor) {
        if (kind == NONE) return {};
        return {kind, *raw, softplus(*raw), 1 / divisor};
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
        int width = row_length(layer.outputs);
        std::vector<float> words(up(layer.inputs, T::PER_WORD) / T::PER_WORD * width, 0.0f);
        Number* numbers = (Number*)words.data();
        for (int o = 0; o < layer.outputs; o += LANES)
            for (int k = 0; k < layer.inputs; k += LANES) {
                V block[LANES];
                turned(&layer.normalised[o * layer.inputs + k], layer.inputs, layer.outputs - o, layer.inputs - k, block);
                for (int l = 0; l < std::min(LANES, layer.inputs - k); l += T::PER_WORD) {
                    Number* to = numbers + place(k + l, o, width);
                    if (T::PER_WORD == 1)
                        T::put(to, block[l]);
                    else
                        T::put_pair(to, 0, block[l], block[l + 1], LANES);
                }
            }
        return words;
    }

    // The weights of all layers that read a group, one below the other, for t -> W^T t.
    std::vector<float> backward_words(int g) const {
        const Group& group = groups[g];
        int width = row_length(group.width), rows = group.after_t - group.first_t;
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

// Gradients of the raw parameters from the sums: dweight, dbias, dbeta, deta of each layer, after the first dbeta.
template <class T>
void finish(const Branch<T>& g, const float* sums, float* const* gradients, int threads) {
    int count = g.layers.size();
    const float* into_betas = sums + g.sums - up(count, LANES);
    std::vector<double> number(count, 0.0), scale(count + 1, 0.0), parts(count * count, 0.0);  // times their own gradients
    over_layers(count, threads, [&](int i) {
        const Layer& layer = g.layers[i];
        int inputs = layer.inputs, padded = up(inputs, LANES);
        double along = 0;
        for (int o = 0; o < layer.outputs; ++o) {
            const float *row = sums + layer.dw + o * padded, *normal = &layer.normalised[o * inputs];
            along += dot(row, layer.weight + o * inputs, inputs);
            for (int j = 0; g.dense && j <= i; ++j) {
                const Group& group = g.groups[j];
                parts[i * count + j] += dot(row + group.offset, normal + group.offset, group.width);
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
    });
    for (int i = 0; i < count; ++i)
        for (int j = 0; j <= i; ++j) number[i] += parts[i * count + j], scale[j] += parts[i * count + j];
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

}  // namespace
