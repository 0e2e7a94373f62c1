// A dense branch of images: the planes that its features and gradients stand in, and its weights as words.
//
// Group 0 of the features is x, group g what layer g - 1 adds; layer l reads groups 0 to l, and the last one, 1 x 1, all.
// Gradients of what layers put out are groups as well, the last layer's first, so that what the readers of a group give
// back is one product.
#pragma once
#include "branch.h"
#include "pixels.h"

namespace {

struct Call {  // as `dense_images.py` passes it
    int32_t low, mirrored, threads, channels, height, width, depth, points, rows;  // rows: per point, itself included
    const int32_t* outputs;
    const float* numbers;  // beta, before, after and divisor of each layer, then what x is multiplied with
    const float* const* biases;
    const float* words;
};

// Groups of channels in planes of at most `in_line` channels; each group, and of mirrored ones each side, starts a plane.
struct Planes {
    int per_word, in_line;
    std::vector<int> planes;  // how many channels are in each
    std::vector<int> starts = {0};  // of the groups, and the end

    void add(int sides, int channels) {
        for (int side = 0; side < sides; ++side)
            for (int c = 0; c < channels; c += in_line) planes.push_back(std::min(in_line, channels - c));
        starts.push_back(planes.size());
    }
    int count() const { return planes.size(); }
    int with(int group, int c, int side = 0, int sides = 1) const {
        return starts[group] + (starts[group + 1] - starts[group]) / sides * side + c / in_line;
    }
    int words(int plane) const { return (planes[plane] + per_word - 1) / per_word; }
    int words(int first_group, int end_group) const {
        int sum = 0;
        for (int p = starts[first_group]; p < starts[end_group]; ++p) sum += words(p);
        return sum;
    }
    // What a pixel's product reads: of each plane the neighbours, one after the other, or the pixel itself.
    void stretch(const Frame& frame, int first_group, int end_group, int taps, std::vector<Stretch>& stretches) const {
        for (int p = starts[first_group]; p < starts[end_group]; ++p)
            for (int tap = 0; tap < taps; ++tap)
                stretches.push_back({p * frame.plane() + (taps > 1 ? frame.step(tap) : 0), words(p)});
    }
    // Where a channel of a group is: its plane has `words`, `before` are those of the group's planes before it.
    struct Channel {
        int before, words, word, number;
    };
    std::vector<Channel> channels(int group) const {
        std::vector<Channel> found;
        for (int p = starts[group], before = 0; p < starts[group + 1]; before += words(p++))
            for (int c = 0; c < planes[p]; ++c) found.push_back({before, words(p), c / per_word, c % per_word});
        return found;
    }
};

template <class T>
struct Net {
    typedef typename T::Number Number;
    int channels, depth, sides;
    std::vector<int> outputs;  // of all layers
    Planes features = {T::PER_WORD, LANES * T::PER_WORD}, slots = features;   // as products over channels read them
    Planes feature_pairs = {1, LANES}, slot_pairs = feature_pairs;  // as those over pixels do
    std::vector<long> forward_words, back_words;  // where the words of each layer and group start
    long words = 0;

    explicit Net(const Call& call)
        : channels(call.channels), depth(call.depth), sides(1 + call.mirrored), outputs(call.outputs, call.outputs + call.depth) {
        outputs.push_back(channels);
        for (Planes* planes : {&features, &feature_pairs})
            for (int g = 0; g <= depth; ++g) planes->add(g ? sides : 1, g ? outputs[g - 1] : channels);
        for (Planes* planes : {&slots, &slot_pairs})
            for (int l = depth; l >= 0; --l) planes->add(1, outputs[l]);
        for (int l = 0; l <= depth; ++l) forward_words.push_back(words), words += blocks(l) * forward_block(l);
        for (int g = 0; g <= depth; ++g) back_words.push_back(words), words += back_blocks(g) * back_block(g);
    }

    int group(int g) const { return g ? sides * outputs[g - 1] : channels; }
    int column(int g) const {  // of a weight, where group g begins
        int sum = 0;
        for (int k = 0; k < g; ++k) sum += group(k);
        return sum;
    }
    int padded(int l) const { return up(outputs[l], LANES); }
    int taps(int l) const { return l < depth ? TAPS : 1; }
    int width(int l) const { return l < depth ? COLUMNS : LANES; }
    long blocks(int l) const { return up(outputs[l], width(l)) / width(l); }
    long forward_block(int l) const { return (long)taps(l) * features.words(0, l + 1) * width(l); }

    // The readers of group g: of the slots, the last layer and then layers depth - 1 to g, or all for x.
    int readers_end(int g) const { return depth + 1 - g; }
    // Of a mirrored group both sides of the same channels make a block. Of x all taps stand side by side.
    long back_blocks(int g) const { return up(g ? sides * padded(g - 1) : TAPS * channels, COLUMNS) / COLUMNS; }
    long back_block(int g) const {
        return (long)(slots.words(0, 1) + (g ? TAPS : 1) * slots.words(1, readers_end(g))) * COLUMNS;
    }

    std::vector<Stretch> forward_stretches(int l, const Frame& frame) const {
        std::vector<Stretch> found;
        features.stretch(frame, 0, l + 1, taps(l), found);
        return found;
    }
    std::vector<Stretch> back_stretches(int g, const Frame& frame) const {
        std::vector<Stretch> found;
        slots.stretch(frame, 0, 1, 1, found);
        slots.stretch(frame, 1, readers_end(g), g ? TAPS : 1, found);
        return found;
    }

    void pack(const Number* const* weights, int threads, float* out) const {
        for (int l = 0; l <= depth; ++l) {
            pack_forward(l, weights[l], threads, (Number*)(out + forward_words[l]));
            for (int g = 0; g <= l; ++g) pack_back(g, l, weights[l], threads, (Number*)(out + back_words[g]));
        }
    }

    // Calls each(channel of the weight, its first word among those of its layer, words to the next tap, number), on threads.
    template <class Each>
    void over_inputs(int l, int threads, Each each) const {
        for (int g = 0; g <= l; ++g) {
            const std::vector<Planes::Channel> found = features.channels(g);
            const long first = features.words(0, g), start = column(g);
#pragma omp parallel for num_threads(threads)
            for (int c = 0; c < (int)found.size(); ++c)
                each(start + c, (first + found[c].before) * taps(l) + found[c].word, found[c].words, found[c].number);
        }
    }

  private:
    void pack_forward(int l, const Number* weight, int threads, Number* out) const {
        const int taps = this->taps(l), wide = width(l), inputs = column(l + 1);
        const long size = forward_block(l);
        over_inputs(l, threads, [&](int c, long word, int next, int number) {
            for (int o = 0; o < outputs[l]; ++o) {
                const Number* from = weight + ((long)o * inputs + c) * taps;
                Number* to = out + (o / wide * size + word * wide + o % wide) * T::PER_WORD + number;
                for (int tap = 0; tap < taps; ++tap) to[(long)tap * next * wide * T::PER_WORD] = from[tap];
            }
        });
    }

    // Taps are turned round: what is given back to a pixel comes from where the pixel was read.
    void pack_back(int g, int l, const Number* weight, int threads, Number* out) const {
        const int taps = this->taps(l), inputs = column(l + 1), start = column(g), slot = depth - l;
        const long last = slots.words(0, 1), first = slot ? slots.words(1, slot) : 0, size = back_block(g);
        const std::vector<Planes::Channel> found = slots.channels(slot);
        const int turned = g && slot ? TAPS : 1;  // taps that are summed, not put side by side
#pragma omp parallel for num_threads(threads)
        for (int o = 0; o < outputs[l]; ++o) {
            const Planes::Channel& at = found[o];
            const long word = slot ? last + (first + at.before) * turned + at.word : at.word + at.before;
            for (int c = 0; c < group(g); ++c) {
                const Number* from = weight + ((long)o * inputs + start + c) * taps;
                for (int tap = 0; tap < taps; ++tap) {
                    const long column = g ? back_column(g, c) : (slot ? tap : CENTRE) * channels + c;
                    const long row = word + (turned > 1 ? (TAPS - 1 - tap) * at.words : 0);
                    out[(column / COLUMNS * size + row * COLUMNS + column % COLUMNS) * T::PER_WORD + at.number] = from[tap];
                }
            }
        }
    }

    // Where a channel of group g stands among its blocks' columns.
    long back_column(int g, int c) const {
        if (sides == 1) return c;
        int side = c / outputs[g - 1], channel = c % outputs[g - 1];
        return channel / LANES * COLUMNS + side * LANES + channel % LANES;
    }
};

}  // namespace
