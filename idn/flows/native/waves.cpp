#include "search.h"

// `ints`: convolutions, outputs, inputs, kernel, height, width, frequencies, places, best, steps, threads.
extern "C" void strongest_waves(const int* ints, const float* weight, const float* frequencies, const float* around,
                                const float* distances, const float* noise, float* kept, float* gain, float* images,
                                float* responses) {
    const int convolutions = ints[0], outputs = ints[1], inputs = ints[2], kernel = ints[3], h = ints[4], w = ints[5];
    const int grid = ints[6], threads = ints[10];
    for (int i = 0; i < convolutions; ++i) {
        Taps taps(weight + (size_t)i * outputs * inputs * kernel * kernel, 1, outputs, inputs, kernel, threads);
        search(taps, h, w, grid, ints[7], std::min(ints[8], grid), ints[9], threads, frequencies, around, distances,
               noise, kept + (size_t)i * 2 * grid * taps.n, gain + i, images + (size_t)i * 2 * inputs * h * w,
               responses + (size_t)i * 2 * outputs * h * w);
    }
}
