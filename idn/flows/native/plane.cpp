// x + g(x) and ln det(I + J_g(x)) of a toy flow's block with two dimensions, and their gradients, in one pass each.
//
// A tile of points goes through all layers while it is in the cache: rows [values; first tangents; second tangents].
// Features stand side by side, each layer's behind those before it. What a dense layer reads is a prefix of them times
// products of a's and b's: written once as phi b_j / (a_0 ... a_j), they need only the number a_0 ... a_(i-1) behind
// layer i's product, so no weight is changed and nothing is scaled twice. Gradients t of what enters the activations
// stand side by side as well, the last layer's first. Vectors may write beyond the end of a layer's columns, where what
// comes next overwrites them, and read beyond it, where the weights are padded with zeros.
//
// In low precision words are pairs of bf16 numbers and products are sums of two; everything else is the same.
#include "tile.h"

namespace {

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
void forward(const Branch<T>& g, int n, int threads, const float* x, float* moved, float* logdet, float* kept) {
    const int last = g.layers.size() - 1;
    std::vector<std::vector<float>> words(last + 1);
    int last_words;
    words[last] = g.last_words(last_words);
    over_layers(last, threads, [&](int i) { words[i] = g.forward_words(g.layers[i]); });
    auto* z = (typename T::Number*)(kept + 4 * n);
    size_t needed = 3 * TILE * (g.widest + g.stride) + 4 * LANES;
    in_tiles(n, threads, needed, [&](int, float* space, int tile, int start, int count) {
        Tile<T>(g, x + 2 * start, count, z + (size_t)tile * g.z_size)
            .forward(words, last_words, space, moved + 2 * start, logdet + start, kept + 4 * start);
    });
}

template <class T>
void backward(const Branch<T>& g, int n, int threads, const float* x, const float* into_moved, const float* into_logdet,
              float* kept, float* into_x, float* const* gradients) {
    std::vector<std::vector<float>> words(g.groups.size());
    int first_words;
    words[0] = g.first_words(first_words);
    over_layers(g.groups.size() - 1, threads, [&](int i) { words[i + 1] = g.backward_words(i + 1); });
    auto* z = (typename T::Number*)(kept + 4 * n);
    std::vector<float> sums((size_t)threads * g.sums, 0.0f);
    size_t needed = 3 * TILE * (g.widest + g.stride + 2 * g.t_stride) + 8 * LANES;
    in_tiles(n, threads, needed, [&](int slot, float* space, int tile, int start, int count) {
        Tile<T>(g, x + 2 * start, count, z + (size_t)tile * g.z_size)
            .backward(words, first_words, space, into_moved + 2 * start, into_logdet + start, kept + 4 * start,
                      into_x + 2 * start, &sums[(size_t)slot * g.sums]);
    });
#pragma omp parallel for num_threads(threads)
    for (int i = 0; i < g.sums; ++i)
        for (int slot = 1; slot < threads; ++slot) sums[i] += sums[(size_t)slot * g.sums + i];
    finish(g, sums.data(), gradients, threads);
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
                   const float* x, float* moved, float* logdet, float* kept) {
    in_precision(low, [&](auto type) {
        forward(Branch<decltype(type)>(ints, floats, pointers, threads), n, threads, x, moved, logdet, kept);
    });
}

void plane_backward(int low, const int* ints, const float* floats, const float* const* pointers, int n, int threads,
                    const float* x, const float* into_moved, const float* into_logdet, float* kept, float* into_x,
                    float* const* gradients) {
    in_precision(low, [&](auto type) {
        backward(Branch<decltype(type)>(ints, floats, pointers, threads), n, threads, x, into_moved, into_logdet, kept, into_x,
                 gradients);
    });
}
}
