// One tile of points on its way through a branch and back.
#pragma once
#include "branch.h"

namespace {

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
                    Swish<float> phi(at, group.phi);
                    value = phi.value, slope = phi.slope;
                }
                put(p, c, value);
                put(points + p, c, d == 0 ? sign * slope : 0);
                put(2 * points + p, c, d == 1 ? sign * slope : 0);
            }
    }

    // What is kept is far away by the time it is wanted, to be read or (1) written.
    template <int WRITE>
    void fetch(const Group& group) const {
        for (long at = 0; at < (long)rows * up(group.before, LANES); at += 64 / BYTES)
            __builtin_prefetch(z + group.z + at, WRITE);
    }

    // The features that a layer's activation makes of what entered it.
    void activate(const Group& group, Number* features) const {
        for (int side = 0; side < group.phi.sides(); ++side)
            activate_side(group, features + group.offset + side * group.before, side ? -1 : 1);
    }

    void activate_side(const Group& group, Number* features, float sign) const {
        const int padded = up(group.before, LANES);
        const long down = (long)points * padded, below = (long)points * g.stride;
        const Activation phi = group.phi;
        const float scale = group.scale, signed_scale = sign * scale;
        for (int p = 0; p < points; p += 2)
            for (int c = 0; c < padded; c += LANES) {
                const Number *one = z + group.z + (long)p * padded + c, *two = one + padded;
                Number *out = features + (long)p * g.stride + c, *next = out + g.stride;
                Swish<V> first(sign * T::get(one), phi), second(sign * T::get(two), phi);
                V slope = first.slope * signed_scale, other = second.slope * signed_scale;
                T::put(out, first.value * scale), T::put(next, second.value * scale);
                T::put(out + below, T::get(one + down) * slope), T::put(next + below, T::get(two + down) * other);
                T::put(out + 2 * below, T::get(one + 2 * down) * slope), T::put(next + 2 * below, T::get(two + 2 * down) * other);
            }
    }

    void forward(const std::vector<std::vector<float>>& words, int last_words, float* space, float* moved, float* logdet,
                 float* jacobian) {
        float* made = wide_buffer(space, g.widest);
        Number* features = (Number*)space;
        enter(features, false);
        int last = g.layers.size() - 1;
        for (int i = 0; i < last; ++i) {
            const Layer& layer = g.layers[i];
            int width = layer.padded(), sum = up(layer.inputs, T::PER_WORD) / T::PER_WORD;
            fetch<1>(g.groups[i + 1]);
            product<T>({features + layer.start, g.stride * BYTES, 4}, words[i].data(), row_length(width), sum, rows, width, made,
                       width, false);
            Number* entering = z + g.groups[i + 1].z;
            for (int r = 0; r < rows; ++r)
                for (int c = 0; c < width; c += LANES) {
                    V value = load(made + r * width + c) * layer.number;
                    if (r < points) value += load(&layer.padded_bias[c]);
                    T::put(entering + r * width + c, value);
                }
            activate(g.groups[i + 1], features);
        }
        const Layer& layer = g.layers[last];
        two_columns<T>((const char*)(features + layer.start), g.stride * BYTES, words[last].data(), last_words, rows,
                       made, 2);
        for (int p = 0; p < n; ++p) {
            const float *first = made + 2 * (points + p), *second = first + 2 * points;
            float j[4] = {first[0], first[1], second[0], second[1]};
            for (int d = 0; d < 2; ++d) moved[2 * p + d] = x[2 * p + d] + layer.number * made[2 * p + d] + layer.bias[d];
            for (int d = 0; d < 4; ++d) jacobian[4 * p + d] = j[d] * layer.number;
            logdet[p] = std::log(determinant(jacobian + 4 * p));
        }
    }

    static float determinant(const float* j) { return (1 + j[0]) * (1 + j[3]) - j[1] * j[2]; }

    // Gradients of what the activation made become those of what entered it, times the layer's number. What it made is
    // made again on the way.
    template <int SIDES>
    float back(const Group& group, const Layer& layer, const float* into, int width, Number* features, Number* t,
               Number* paired, float* into_bias) const {
        const int padded = layer.padded(), stride = g.t_stride;
        const long down = (long)points * padded, into_down = (long)points * width, below = (long)points * stride;
        const Activation phi = group.phi;
        const float scale = group.scale, number = layer.number;
        V into_beta = {};
        for (int p = 0; p < points; p += 2)
            for (int c = 0; c < padded; c += LANES) {
                V made[3][2], feature[SIDES][3][2];
#pragma GCC unroll 2
                for (int i = 0; i < 2; ++i) {
                    const Number* at = z + group.z + (long)(p + i) * padded + c;
                    const float* grad = into + (long)(p + i) * width + c;
                    V x = T::get(at), x1 = T::get(at + down), x2 = T::get(at + 2 * down);
#pragma GCC unroll 2
                    for (int side = 0; side < SIDES; ++side, grad += group.before) {
                        const float sign = side ? -1 : 1;
                        V d = load(grad), d1 = load(grad + into_down), d2 = load(grad + 2 * into_down);
                        Swish<V> swish(sign * x, phi);
                        V bend = scale * swish.bend * (x1 * d1 + x2 * d2), slope = sign * scale * swish.slope;
                        V value = slope * d + phi.beta * bend;
                        made[0][i] = side ? made[0][i] + value : value;
                        made[1][i] = side ? made[1][i] + slope * d1 : slope * d1;
                        made[2][i] = side ? made[2][i] + slope * d2 : slope * d2;
                        into_beta += x * (scale * d * x * swish.hill + bend);
                        feature[side][0][i] = scale * swish.value;
                        feature[side][1][i] = slope * x1, feature[side][2][i] = slope * x2;
                    }
                }
                store(into_bias + c, load(into_bias + c) + made[0][0] + made[0][1]);
#pragma GCC unroll 3
                for (int j = 0; j < 3; ++j) {
                    // The columns behind belong to the next group, which has been here before.
                    Number* to = features + (p + (long)j * points) * g.stride + (group.offset + c) * T::PER_WORD;
                    for (int side = 0; side < SIDES; ++side, to += group.before * T::PER_WORD)
                        T::put_pair(to, g.stride, feature[side][j][0], feature[side][j][1], group.before - c);
                    const long row = (long)p * stride + j * below;
                    V one = made[j][0] * number, two = made[j][1] * number;
                    T::put_pair(paired + row + (layer.t + c) * T::PER_WORD, stride, one, two, LANES);
                    if (T::PER_WORD == 1) continue;
                    T::put(t + row + layer.t + c, one);
                    T::put(t + row + stride + layer.t + c, two);
                }
            }
        return total(into_beta);
    }

    void backward(const std::vector<std::vector<float>>& words, int first_words, float* space, const float* into_moved,
                  const float* into_logdet, const float* jacobian, float* into_x, float* sums) {
        int last = g.layers.size() - 1;
        float* into = wide_buffer(space, g.widest);
        Number* features = (Number*)wide_buffer(space, g.stride);
        Number* paired = (Number*)wide_buffer(space, g.t_stride);
        Number* t = T::PER_WORD == 1 ? paired : (Number*)space;
        float* into_betas = sums + g.sums - up(last + 1, LANES);
        enter(features, true);
        leave(t, paired, into_moved, into_logdet, jacobian, sums + g.layers[last].db);
        for (int i = last; i > 0; --i) {
            const Group& group = g.groups[i];
            int width = up(group.width, LANES), sum = up(group.after_t - group.first_t, T::PER_WORD) / T::PER_WORD;
            fetch<0>(group);
            product<T>({t + group.first_t, g.t_stride * BYTES, 4}, words[i].data(), row_length(width), sum, rows, width, into,
                       width, false);
            const Layer& before = g.layers[i - 1];
            auto through = group.phi.kind == CLIPSWISH ? &Tile::back<2> : &Tile::back<1>;
            into_betas[i] += (this->*through)(group, before, into, width, features, t, paired, sums + before.db);
        }
        for (const Layer& layer : g.layers) {
            int inputs = up(layer.inputs, LANES);
            product<T>({(float*)paired + layer.t, 4, 4 * g.t_stride}, (float*)features + layer.start, g.stride,
                       rows / T::PER_WORD, layer.outputs, inputs, sums + layer.dw, inputs, true);
        }
        const Group& group = g.groups[0];
        for (int c = 0; c < group.width; c += 2)
            two_columns<T>((const char*)(t + group.first_t), g.t_stride * BYTES, &words[0][c * first_words],
                           first_words, rows, into + c, 4);
        into_betas[0] += back_to_input(into, into_x);
        for (int i = 0; i < 2 * n; ++i) into_x[i] += into_moved[i];
    }

    // The gradients of the last layer's rows, from those of g(x) and of ln det(I + J).
    void leave(Number* t, Number* paired, const float* into_moved, const float* into_logdet, const float* jacobian,
               float* into_bias) const {
        const Layer& layer = g.layers.back();
        for (int p = 0; p < points; ++p) {
            float rows[3][2] = {};  // of padding points too: another tile was here
            if (p < n) {
                const float* j = jacobian + 4 * p;
                float part = into_logdet[p] / determinant(j);
                rows[0][0] = into_moved[2 * p], rows[0][1] = into_moved[2 * p + 1];
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
                    Swish<float> swish(at, phi);
                    float grad = value[2 * side + d], bend = swish.bend * sign * tangent[2 * side + d];
                    sum += sign * (swish.slope * grad + phi.beta * bend);
                    into_beta += at * (grad * at * swish.hill + bend);
                }
                into_x[2 * p + d] = sum;
            }
        return into_beta;
    }
};

}  // namespace
