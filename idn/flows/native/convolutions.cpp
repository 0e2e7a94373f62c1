// The norm of a 3x3 convolution, followed for one step: `_beside_wave` in layers.py and `top_beside_wave` in norms.py.
#include "mixes.h"
#include "search.h"
#include "winograd.h"

namespace {

float largest_entry(const float* weight, int rows, int columns, int threads) {
    float found = TINY;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(max : found)
    for (int row = 0; row < rows; ++row) {
        V largest = {};
        for (int i = 0; i < columns; i += LANES) {
            V x = some(weight + (long)row * columns + i, columns - i);
            largest = x > largest ? x : -x > largest ? -x : largest;
        }
        for (int l = 0; l < LANES; ++l) found = std::max(found, largest[l]);
    }
    return found;
}

struct Layer {  // all but the weight are written
    const float* weight;
    float *u, *v, *climb, *channels, *sigma, *slack;
};

struct Search {
    int grid, places, best, steps;
    const float *frequencies, *around, *distances, *noise;
};

void follow(const Shape& s, const Layer& layer, const Search& search_for, float independent, float adapts) {
    const long put_in = s.put_in(), put_out = s.put_out();
    // Squares of huge or tiny weights leave the range of fp32, so the largest entry is made 1.
    const float largest = largest_entry(layer.weight, s.outputs, s.inputs * 9, s.threads);
    const float scale = 1 / largest;
    const Space waves = space(2 * put_in), responses = space(2 * put_out), applied = space(2 * put_out);
    const Space vector = space(put_in), image = space(put_out);
    float gain;
    {
        const Taps taps(layer.weight, scale, s.outputs, s.inputs, 3, s.threads);
        const Search& f = search_for;
        search(taps, s.height, s.width, f.grid, f.places, std::min(f.best, f.grid), f.steps, s.threads, f.frequencies,
               f.around, f.distances, f.noise, layer.channels, &gain, waves.get(), responses.get());
    }
    const float* pair[] = {layer.v, layer.climb};
    float* images[] = {applied.get(), applied.get() + put_out};
    const Turned weight(s, layer.weight, scale);
    weight.products(false, 2, pair, images);
    const float* const basis[] = {layer.v, layer.climb, &waves[0], &waves[put_in]};
    const float* const reached[] = {images[0], images[1], &responses[0], &responses[put_out]};
    const Longest found =
        longest(basis, reached, put_in, put_out, s.threads, independent, vector.get(), image.get());
    const float* from = image.get();
    weight.products(true, 1, &from, &layer.climb);
    std::copy_n(vector.get(), put_in, layer.v);
    const float square = found.square, left = gradient(layer.v, square, put_in, s.threads, layer.climb);
    const float sigma = std::max(std::sqrt(square), TINY);
#pragma omp parallel for num_threads(s.threads) schedule(static)
    for (long i = 0; i < put_out; ++i) layer.u[i] = image[i] / sigma;
    float missing = square > 0 ? std::sqrt(1 + left / std::max(square, TINY)) - 1 : 0;
    const float by_wave = found.by_wave, expected = by_wave + adapts * (gain - by_wave);
    missing = std::max(missing, expected / sigma - 1);
    *layer.slack = std::min(missing, std::max(gain / sigma - 1, 0.0f));
    *layer.sigma = std::sqrt(square) * largest;
}

}  // namespace

extern "C" {

// `ints`: outputs, inputs, height, width, threads, frequencies, places, best, steps.
void follow(const int* ints, float independent, float adapts, float* const* layer, const float* const* tables) {
    follow({ints[0], ints[1], ints[2], ints[3], ints[4]},
           {layer[0], layer[1], layer[2], layer[3], layer[4], layer[5], layer[6]},
           {ints[5], ints[6], ints[7], ints[8], tables[0], tables[1], tables[2], tables[3]}, independent, adapts);
}

// The slope of u^T W v over W. `ints`: outputs, inputs, height, width, threads.
void slope(const int* ints, const float* const* vectors, float* out) {
    slope({ints[0], ints[1], ints[2], ints[3], ints[4]}, vectors[0], vectors[1], out);
}
}
