// One image on its way through a dense branch and back, while it is in the cache.
//
// A feature is r phi(a y + b), where y is what a layer's product puts out, and its tangent r a phi'(a y + b) y': numbers
// as in dense.py. In low precision words are pairs of numbers: of channels for products over channels, and of a point
// and its tangent for those over pixels, the gradients of weights, which are summed over both.
#pragma once
#include "net.h"

namespace {

constexpr int MOST_ROWS = 4, FORWARD_LINES = 4, BACK_LINES = 4;  // lines whose words stay in the cache

struct Feature {
    Activation phi;
    float before, after;
    const float* bias;
    V entering(V y, int c) const { return before * y + load(bias + c); }
};

template <class T>
struct Passes {
    typedef typename T::Number Number;
    static constexpr bool PAIRED = T::PER_WORD == 2;
    const Net<T>& net;
    const Call& call;
    const Frame frame;
    const int height, width, rows, pairs, depth;  // rows of an image, and how many words they make
    std::vector<Feature> phi;
    float passed;

    Passes(const Net<T>& net, const Call& call)
        : net(net), call(call), frame{call.height, call.width}, height(call.height), width(call.width), rows(call.rows),
          pairs((rows + T::PER_WORD - 1) / T::PER_WORD), depth(net.depth) {
        for (int l = 0; l < depth; ++l) {
            const float* n = call.numbers + 4 * l;
            phi.push_back({{LIPSWISH, 0, n[0], 1 / n[3]}, n[1], n[2], call.biases[l]});
        }
        passed = call.numbers[4 * depth];
    }

    long pixels() const { return (long)height * width; }
    long size(const Planes& planes) const { return planes.count() * frame.plane(); }
    long shares() const { return (height + 2) * (width + 2) * share_pitch(); }
    long share_pitch() const { return net.back_blocks(0) * COLUMNS; }
    const float* words(long start) const { return call.words + start; }

    // The first group of an image: rows of channels, times a factor, and zeros up to whole planes.
    void enter(const Number* from, float factor, float* to) const {
        const int channels = net.channels, in_line = net.features.in_line;
        for (int y = 0; y < height; ++y)
            for (int x = 0; x < width; ++x, from += channels)
                for (int c = 0; c < up(channels, in_line); ++c) {
                    Number* pixel = (Number*)(to + c / in_line * frame.plane() + frame.at(y, x)) + c % in_line;
                    *pixel = c < channels ? T::number(T::rounded(factor * value(from[c]))) : Number{};
                }
    }
    static float value(float x) { return x; }
    static float value(uint16_t x) {
        uint32_t bits = (uint32_t)x << 16;
        float wide;
        std::memcpy(&wide, &bits, 4);
        return wide;
    }

    // The same numbers of a point and its tangent side by side.
    void pair_up(float* const* from, float* const* to) const {
        const int in_line = net.features.in_line;
        for (int k = 0; PAIRED && k < pairs; ++k)
            for (int c = 0; c < up(net.channels, LANES); ++c)
                for (int y = 0; y < height; ++y)
                    for (int x = 0; x < width; ++x) {
                        const long at = c / in_line * frame.plane() + frame.at(y, x);
                        Number* word = (Number*)(to[k] + c / LANES * frame.plane() + frame.at(y, x) + c % LANES);
                        word[0] = ((Number*)(from[2 * k] + at))[c % in_line];
                        word[1] = 2 * k + 1 < rows ? ((Number*)(from[2 * k + 1] + at))[c % in_line] : Number{};
                    }
    }

    // Puts LANES channels of all rows to a place in planes of numbers.
    void put_numbers(const V* values, long at, int c, float* const* to) const {
        for (int r = 0; r < rows; ++r) T::put((Number*)(to[r] + at) + c, values[r]);
    }
    // The same as words of a point and its tangent.
    void put_pairs(const V* values, long at, float* const* to) const {
        for (int k = 0; k < pairs; ++k) {
            V other = PAIRED && 2 * k + 1 < rows ? values[2 * k + 1] : V{};
            store(to[k] + at, paired<T>(values[PAIRED ? 2 * k : k], other));
        }
    }

    // What a layer makes of its features, those rows that are not known: y, and the slopes and new features if wanted.
    struct Made {
        Number* const* y;
        int known;
        Number* slopes;
        float* const* features;
    };

    void layer(int l, float* const* entering, const Made& made) const {
        const int padded = net.padded(l), sides = net.sides;
        const std::vector<Stretch> stretches = net.forward_stretches(l, frame);
        in_strips(net.blocks(l), [&](int block, int y, auto size, int x) {
            constexpr int M = size;
            alignas(64) float sums[MOST_ROWS][PIXELS * COLUMNS];
            long places[2][VECTORS];
            for (int v = 0; v < VECTORS; ++v)
                for (int side = 0; side < sides; ++side)
                    places[side][v] = net.features.with(l + 1, block * COLUMNS + v * LANES, side, sides) * frame.plane();
            for (int r = made.known; r < rows; ++r)
                convolve<T, M, VECTORS>(entering[r] + frame.at(y, x), stretches, words(net.forward_words[l]) + block * net.forward_block(l),
                                        sums[r]);
            for (int v = 0, c = block * COLUMNS; v < VECTORS && c < padded; ++v, c += LANES) {
                const Feature f = phi[l];
                const int in_line = c % net.features.in_line;
                for (int i = 0; i < M; ++i) {
                    const long pixel = (long)y * width + x + i, at = pixel * padded + c;
                    V in[MOST_ROWS], out[MOST_ROWS];
                    for (int r = made.known; r < rows; ++r) {
                        in[r] = T::rounded(load(sums[r] + (i * VECTORS + v) * LANES));
                        if (made.y) T::put(made.y[r] + at, in[r]);
                    }
                    if (!made.slopes && !made.features) continue;
                    for (int r = 0; r < made.known; ++r) in[r] = T::get(made.y[r] + at);
                    V entering = f.entering(in[0], c);
                    for (int side = 0; side < sides; ++side) {
                        Swish<V> swish(side ? -entering : entering, f.phi);
                        V slope = (side ? -f.after : f.after) * f.before * swish.slope;
                        if (made.slopes) T::put(made.slopes + (pixel * sides + side) * padded + c, slope);
                        out[0] = f.after * swish.value;
                        for (int r = 1; r < rows; ++r) out[r] = slope * in[r];
                        if (made.features) put_numbers(out, places[side][v] + frame.at(y, x + i), in_line, made.features);
                    }
                }
            }
        });
    }

    template <class Each>
    void in_strips(long blocks, Each each) const {
        for (int top = 0; top < height; top += FORWARD_LINES)
            for (long block = 0; block < blocks; ++block)
                for (int y = top; y < std::min(height, top + FORWARD_LINES); ++y)
                    in_blocks(width, [&](auto size, int x) { each(block, y, size, x); });
    }

    void last(const float* entering, const float* bias, float* out) const {
        const std::vector<Stretch> stretches = net.forward_stretches(depth, frame);
        in_strips(net.blocks(depth), [&](int block, int y, auto size, int x) {
            constexpr int M = size;
            alignas(64) float sums[PIXELS * LANES];
            convolve<T, M, 1>(entering + frame.at(y, x), stretches, words(net.forward_words[depth]) + block * net.forward_block(depth), sums);
            const int c = block * LANES, lanes = std::min(LANES, net.channels - c);
            for (int i = 0; i < M; ++i) {
                V sum = load(sums + i * LANES);
                put(out + ((long)y * width + x + i) * net.channels + c, bias ? sum + load(bias + c) : sum, lanes);
            }
        });
    }

    // What all readers of group g give back to a pixel and its neighbours, for blocks of columns. While it is summed,
    // what `fetch` asks for comes from memory.
    template <class Fetch, class Each>
    void given_back(int g, float* const* entering, int count, Fetch fetch, Each each) const {
        const std::vector<Stretch> stretches = net.back_stretches(g, frame);
        in_strips(net.back_blocks(g), [&](int block, int y, auto size, int x) {
            constexpr int M = size;
            alignas(64) float sums[MOST_ROWS][PIXELS * COLUMNS];
            for (int i = 0; i < M; ++i) fetch(block, y, x + i);
            for (int r = 0; r < count; ++r)
                convolve<T, M, VECTORS>(entering[r] + frame.at(y, x), stretches, words(net.back_words[g]) + block * net.back_block(g),
                                        sums[r]);
            each(block, y, x, M, sums);
        });
    }

    // Calls each(vector, channel) for the channels of a block of columns; of mirrored groups a block has both sides.
    template <class Each>
    void over_vectors(int block, int padded, Each each) const {
        const int vectors = VECTORS / net.sides;
        for (int v = 0, c = block * vectors * LANES; v < vectors && c < padded; ++v, c += LANES) each(v, c);
    }

    // Of the features of x: each tap's share goes to the pixel that it has read.
    void leave(float* const* entering, int count, float* space, float* const* out) const {
        const int channels = net.channels;
        const long pitch = share_pitch(), down = (width + 2) * pitch;
        for (int r = 0; r < count; ++r)
            for (int y = -1; y <= height; ++y)
                for (int x = -1; x <= width; ++x)
                    if (y < 0 || x < 0 || y == height || x == width)
                        std::fill_n(space + r * shares() + (y + 1) * down + (x + 1) * pitch, pitch, 0.0f);
        given_back(0, entering, count, [](int, int, int) {}, [&](int block, int y, int x, int pixels, auto& sums) {
            for (int r = 0; r < count; ++r)
                for (int i = 0; i < pixels; ++i)
                    std::copy_n(sums[r] + i * COLUMNS, (int)COLUMNS,
                                space + r * shares() + (y + 1) * down + (x + i + 1) * pitch + block * COLUMNS);
        });
        for (int r = 0; r < count; ++r)
            for (int y = 0; y < height; ++y)
                for (int x = 0; x < width; ++x) {
                    const float* here = space + r * shares() + (y + 1) * down + (x + 1) * pitch;
                    float* to = out[r] + ((long)y * width + x) * channels;
                    std::fill_n(to, channels, 0.0f);
                    for (int tap = 0; tap < TAPS; ++tap) {
                        const float* from = here + tap * channels - (tap / 3 - 1) * down - (tap % 3 - 1) * pitch;
                        for (int c = 0; c < channels; ++c) to[c] += passed * from[c];
                    }
                }
    }

    // J^T u, for one row of slots.
    void pull(const Number* const* slopes, float* t, float* space, float* out) const {
        for (int g = depth; g; --g) {
            const int l = g - 1, padded = net.padded(l), sides = net.sides;
            auto slope_at = [&](int y, int x) { return slopes[l] + ((long)y * width + x) * sides * padded; };
            auto fetch = [&](int block, int y, int x) {
                over_vectors(block, padded, [&](int, int c) {
                    for (int side = 0; side < sides; ++side) __builtin_prefetch(slope_at(y, x) + side * padded + c);
                });
            };
            given_back(g, &t, 1, fetch, [&](int block, int y, int x, int pixels, auto& sums) {
                over_vectors(block, padded, [&](int v, int c) {
                    Number* to = (Number*)(t + net.slots.with(depth - l, c) * frame.plane() + frame.at(y, x)) + c % net.slots.in_line;
                    for (int i = 0; i < pixels; ++i, to += LANES * T::PER_WORD) {
                        const Number* slope = slope_at(y, x + i) + c;
                        const float* sum = sums[0] + i * COLUMNS + v * LANES;
                        V made = load(sum) * T::get(slope);
                        if (sides == 2) made += load(sum + LANES) * T::get(slope + padded);
                        T::put(to, made);
                    }
                });
            });
        }
        leave(&t, 1, space, &out);
    }

    // Gradients of what layer l has put out, from those of its features; of its bias and beta. On the way the features
    // are made again, as words for the gradients of weights, if those are not there.
    void back(int l, const Number* const* y_rows, float* const* t, float* const* t_words, float* const* f_words, float* into_bias,
              double* into_beta) const {
        const int padded = net.padded(l), sides = net.sides;
        V beta = {};
        auto fetch = [&](int block, int y, int x) {
            over_vectors(block, padded, [&](int, int c) {
                for (int r = 0; r < rows; ++r) __builtin_prefetch(y_rows[r] + ((long)y * width + x) * padded + c);
            });
        };
        given_back(l + 1, t, rows, fetch, [&](int block, int y, int x, int pixels, auto& sums) {
            over_vectors(block, padded, [&](int v, int c) {
                const Feature f = phi[l];
                const int in_line = c % net.slots.in_line;
                const long plane = frame.plane(), pair_slot = net.slot_pairs.with(depth - l, c) * plane;
                const long slot = net.slots.with(depth - l, c) * plane;
                long features[2];
                for (int side = 0; side < sides; ++side) features[side] = net.feature_pairs.with(l + 1, c, side, sides) * plane;
                V bias = {};
                for (int i = 0; i < pixels; ++i) {
                    const long at = ((long)y * width + x + i) * padded + c, here = frame.at(y, x + i);
                    V in[MOST_ROWS], out[MOST_ROWS] = {};
                    for (int r = 0; r < rows; ++r) in[r] = T::get(y_rows[r] + at);
                    V entering = f.entering(in[0], c);
                    for (int side = 0; side < sides; ++side) {
                        Swish<V> swish(side ? -entering : entering, f.phi);
                        V slope = side ? -swish.slope : swish.slope, through = {}, grad[MOST_ROWS], feature[MOST_ROWS];
                        feature[0] = f.after * swish.value;
                        for (int r = 0; r < rows; ++r) {
                            grad[r] = f.after * load(sums[r] + i * COLUMNS + (side + v) * LANES);
                            out[r] += slope * grad[r];
                            if (!r) continue;
                            through += in[r] * grad[r];
                            feature[r] = f.after * f.before * slope * in[r];
                        }
                        V bend = swish.bend * f.before * through;
                        out[0] += f.phi.beta * bend;
                        beta += entering * (grad[0] * entering * swish.hill + bend);
                        if (f_words) put_pairs(feature, features[side] + here, f_words);
                    }
                    bias += out[0];
                    for (int r = 0; r < rows; ++r) out[r] *= f.before;
                    put_pairs(out, pair_slot + here, t_words);
                    if (PAIRED) put_numbers(out, slot + here, in_line, t);
                }
                store(into_bias + c, load(into_bias + c) + bias);
            });
        });
        *into_beta += total(beta);
    }

    // Adds to the gradients of all weights, which are sums over pixels of features times gradients.
    void correlate_all(const float* const* f_words, const float* const* t_words, float* sums) const {
        for (int top = 0; top < height; top += BACK_LINES) {
            const int lines = std::min(BACK_LINES, height - top);
            for (int l = 0; l <= depth; ++l) {
                const Planes &slots = net.slot_pairs, &features = net.feature_pairs;
                const long stride = net.padded(l), each_tap = features.words(0, l + 1) * stride;
                const int start = slots.starts[depth - l], end = slots.starts[depth - l + 1];
                float* into = sums + weight_sums(l);
                for (int slot = start; slot < end; slot += VECTORS, into += COLUMNS) {
                    float* to = into;
                    for (int plane = 0; plane < features.starts[l + 1]; to += features.words(plane++) * stride)
                        in_blocks(features.words(plane), [&](auto size, int i) {
                            constexpr int M = size;
                            for (int k = 0; k < pairs; ++k)
                                for (int tap = 0; tap < net.taps(l); ++tap) {
                                    const long step = l < depth ? frame.step(tap) : 0;
                                    const float* a = f_words[k] + plane * frame.plane() + frame.at(top, 0) + step + i;
                                    const float* b = t_words[k] + slot * frame.plane() + frame.at(top, 0);
                                    if (end - slot == 1)
                                        correlate<T, M, 1>(a, b, frame, lines, to + tap * each_tap + i * stride, stride);
                                    else
                                        correlate<T, M, VECTORS>(a, b, frame, lines, to + tap * each_tap + i * stride, stride);
                                }
                        });
                }
            }
        }
    }

    // Sums of a thread: of each layer the weight by taps, inputs and outputs, then the biases.
    long weight_sums(int l) const {
        long size = 0;
        for (int k = 0; k < l; ++k) size += (long)net.taps(k) * net.column(k + 1) * net.padded(k);
        return size;
    }
    long bias_sums(int l) const {
        long size = weight_sums(depth + 1);
        for (int k = 0; k < l; ++k) size += net.padded(k);
        return size;
    }
    long all_sums() const { return bias_sums(depth); }
};

}  // namespace
