// Dense branches of images: values and tangents, J^T u, and gradients, one image after the other, so that what a branch
// makes on the way stays in the cache and takes no memory. What is kept between the passes are y of each layer and image,
// as far as the caller has room for them, and the slopes r a phi' of the points: pixels of channels padded to whole vectors.
#include <memory>

#include "passes.h"

namespace {

constexpr int LINE = 16;  // floats of a line of the cache
float* aligned(float* start) { return (float*)(((uintptr_t)start + 63) / 64 * 64); }

// Memory that a thread goes on using: a piece for its images, and the calling one's for the sums of all threads.
enum Use { IMAGES, SUMS };

template <Use>
float* memory(size_t floats) {
    static thread_local std::unique_ptr<float[]> kept;
    static thread_local size_t size = 0;
    if (size < floats) {
        kept.reset();  // before the larger one is taken
        kept.reset(new float[floats + LINE]);
        size = floats;
    }
    return aligned(kept.get());
}

struct Workspace {
    float* next;

    template <class Number>
    Number* take(long numbers) {
        Number* start = (Number*)next;
        next += up((numbers * sizeof(Number) + 3) / 4, LANES);
        return start;
    }
    float* image(const Frame& frame, const Planes& planes) {
        float* start = take<float>(planes.count() * frame.plane());
        frame.clear_margin(start, planes.count());
        return start;
    }
};

// Calls each(slot, image, space) for all images; slots are threads, and take turns.
template <class Each>
void over_images(int count, int threads, size_t floats, Each each) {
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int slot = 0; slot < threads; ++slot) {
        float* start = memory<IMAGES>(floats);
        for (int image = slot; image < count; image += threads) each(slot, image, Workspace{start});
    }
}

// Where a layer's y of one image are; those of the first `known` rows are kept by the caller.
template <class Number>
struct Rows {
    Number* row[MOST_ROWS] = {};
    int known = 0;

    Rows(const Call& call, void* const* kept, int layer, int image) {
        const int count = call.rows * call.points;
        for (int r = 0; r < call.rows; ++r) row[r] = (Number*)kept[layer * count + r * call.points + image];
        while (known < call.rows && row[known]) ++known;
    }
};

template <class T, class Number = typename T::Number>
void forward(const Call& call, const Number* x, void* const* kept, void* const* slopes, float* out) {
    Net<T> net(call);
    Passes<T> pass(net, call);
    const long pixels = pass.pixels();
    over_images(call.points, call.threads, pass.rows * pass.size(net.features), [&](int, int p, Workspace space) {
        float* f[MOST_ROWS];
        for (int r = 0; r < pass.rows; ++r) {
            f[r] = space.image(pass.frame, net.features);
            pass.enter(x + ((long)r * call.points + p) * pixels * net.channels, pass.passed, f[r]);
        }
        for (int l = 0; l < net.depth; ++l) {
            Rows<Number> y(call, kept, l, p);
            pass.layer(l, f, {y.known ? y.row : nullptr, 0, (Number*)slopes[l] + p * net.sides * pixels * net.padded(l), f});
        }
        for (int r = 0; r < pass.rows; ++r)
            pass.last(f[r], r ? nullptr : call.biases[net.depth], out + ((long)r * call.points + p) * pixels * net.channels);
    });
}

template <class T, class Number = typename T::Number>
void pull(const Call& call, int count, const Number* u, void* const* slopes, float* out) {
    Net<T> net(call);
    Passes<T> pass(net, call);
    const long pixels = pass.pixels();
    over_images(count, call.threads, pass.size(net.slots) + up(pass.shares(), LANES), [&](int, int i, Workspace space) {
        float* t = space.image(pass.frame, net.slots);
        pass.enter(u + i * pixels * net.channels, 1, t);
        std::vector<const Number*> own;
        for (int l = 0; l < net.depth; ++l)
            own.push_back((const Number*)slopes[l] + i % call.points * pixels * net.sides * net.padded(l));
        pass.pull(own.data(), t, space.take<float>(pass.shares()), out + i * pixels * net.channels);
    });
}

// Sums of all threads to the gradients: weight, bias and beta of each layer, and the last weight. Then, of each layer, the
// weight times its gradient, summed for each channel that comes in.
template <class T>
void gather(const Passes<T>& pass, const float* total, const std::vector<double>& betas, float* const* gradients) {
    const Net<T>& net = pass.net;
    const int threads = pass.call.threads;
    const long sums = pass.all_sums();
    auto summed = [&](long at) {
        V sum = {};
        for (int slot = 0; slot < threads; ++slot) sum += load(total + slot * sums + at);
        return sum;
    };
    for (int l = 0; l <= net.depth; ++l) {
        const int taps = net.taps(l), inputs = net.column(l + 1), wide = net.width(l);
        const long stride = net.padded(l), weight = pass.weight_sums(l);
        const float* words = pass.words(net.forward_words[l]);
        net.over_inputs(l, threads, [&](int c, long word, int next, int number) {
            V along = {};
            for (int first = 0; first < net.outputs[l]; first += LANES)
                for (int tap = 0; tap < taps; ++tap) {
                    V sum = summed(weight + ((long)tap * inputs + c) * stride + first);
                    const float* at = words + first / wide * net.forward_block(l) + (word + tap * next) * wide + first % wide;
                    along += sum * unpaired<T>(load(at), number);
                    float* to = gradients[3 * l] + ((long)first * inputs + c) * taps + tap;
                    for (int o = 0; o < std::min(LANES, net.outputs[l] - first); ++o) to[(long)o * inputs * taps] = sum[o];
                }
            gradients[3 * net.depth + 1 + l][c] = ::total(along);
        });
        if (l == net.depth) break;
        double beta = 0;
        for (int slot = 0; slot < threads; ++slot) beta += betas[slot * net.depth + l];
        *gradients[3 * l + 2] = beta;
        for (int o = 0; o < net.outputs[l]; o += LANES) put(gradients[3 * l + 1] + o, summed(pass.bias_sums(l) + o), net.outputs[l] - o);
    }
}

template <class T, class Number = typename T::Number>
void backward(const Call& call, const Number* x, void* const* kept, const Number* grad, float* into,
              float* const* gradients) {
    Net<T> net(call);
    Passes<T> pass(net, call);
    const int rows = pass.rows, depth = net.depth;
    const long pixels = pass.pixels(), sums = pass.all_sums();
    size_t needed = rows * (pass.size(net.features) + pass.size(net.slots) + up(pass.shares(), LANES));
    if (Passes<T>::PAIRED) needed += pass.pairs * (pass.size(net.feature_pairs) + pass.size(net.slot_pairs));
    for (int l = 0; l < depth; ++l) {
        int known = rows;  // of all images
        for (int p = 0; p < call.points; ++p) known = std::min(known, Rows<Number>(call, kept, l, p).known);
        needed += (rows - known) * up(pixels * net.padded(l), LANES);
    }
    float* total = memory<SUMS>(call.threads * sums);
    std::fill_n(total, call.threads * sums, 0.0f);
    std::vector<double> betas((size_t)call.threads * depth);
    over_images(call.points, call.threads, needed, [&](int slot, int p, Workspace space) {
        float *f[MOST_ROWS], *t[MOST_ROWS], *leaving[MOST_ROWS], *f_words[MOST_ROWS], *t_words[MOST_ROWS];
        std::vector<Rows<Number>> y;
        int unknown = 0;  // layers whose y is made again, and before them
        for (int l = 0; l < depth; ++l) {
            y.emplace_back(call, kept, l, p);
            if (y[l].known < rows) unknown = l + 1;
            for (int r = y[l].known; r < rows; ++r) y[l].row[r] = space.take<Number>(pixels * net.padded(l));
        }
        for (int r = 0; r < rows; ++r) {
            const long row = (long)r * call.points + p, numbers = pixels * net.channels;
            f[r] = space.image(pass.frame, net.features), t[r] = space.image(pass.frame, net.slots);
            pass.enter(x + row * numbers, pass.passed, f[r]);
            pass.enter(grad + row * numbers, 1, t[r]);
            leaving[r] = into + row * numbers;
        }
        for (int k = 0; k < pass.pairs; ++k) {
            f_words[k] = Passes<T>::PAIRED ? space.image(pass.frame, net.feature_pairs) : f[k];
            t_words[k] = Passes<T>::PAIRED ? space.image(pass.frame, net.slot_pairs) : t[k];
        }
        pass.pair_up(f, f_words);
        pass.pair_up(t, t_words);
        for (int l = 0; l < unknown; ++l) pass.layer(l, f, {y[l].row, y[l].known, nullptr, l + 1 < unknown ? f : nullptr});
        float* own = total + slot * sums;
        for (int l = depth - 1; l >= 0; --l) {
            const bool there = !Passes<T>::PAIRED && l + 1 < unknown;  // the words of its features
            pass.back(l, y[l].row, t, t_words, there ? nullptr : f_words, own + pass.bias_sums(l), &betas[slot * depth + l]);
        }
        pass.leave(t, rows, space.take<float>(rows * pass.shares()), leaving);
        pass.correlate_all(f_words, t_words, own);
    });
    gather(pass, total, betas, gradients);
}

template <class Body>
void in_precision(int low, Body body) {
#ifdef __AVX512BF16__
    if (low) return body(Low());
#endif
    body(Full());
}

}  // namespace

extern "C" {

int dense_low() {
#ifdef __AVX512BF16__
    return 1;
#else
    return 0;
#endif
}

int dense_lanes() { return LANES; }
int dense_most_rows() { return MOST_ROWS; }

int64_t dense_words(const Call* call) {
    int64_t count;
    in_precision(call->low, [&](auto type) { count = Net<decltype(type)>(*call).words; });
    return count;
}

void dense_pack(const Call* call, const void* const* weights, float* words) {
    in_precision(call->low, [&](auto type) {
        using T = decltype(type);
        Net<T>(*call).pack((const typename T::Number* const*)weights, call->threads, words);
    });
}

void dense_forward(const Call* call, const void* x, void* const* kept, void* const* slopes, float* out) {
    in_precision(call->low, [&](auto type) {
        using T = decltype(type);
        forward<T>(*call, (const typename T::Number*)x, kept, slopes, out);
    });
}

void dense_pull(const Call* call, int count, const void* u, void* const* slopes, float* out) {
    in_precision(call->low, [&](auto type) {
        using T = decltype(type);
        pull<T>(*call, count, (const typename T::Number*)u, slopes, out);
    });
}

void dense_backward(const Call* call, const void* x, void* const* kept, const void* grad, float* into,
                    float* const* gradients) {
    in_precision(call->low, [&](auto type) {
        using T = decltype(type);
        using Number = typename T::Number;
        backward<T>(*call, (const Number*)x, kept, (const Number*)grad, into, gradients);
    });
}
}
